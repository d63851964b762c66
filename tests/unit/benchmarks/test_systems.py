"""Fewest bytes by hand, who is measured, and tables of small figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.collectives import possible_contestants
from benchmarks.systems.bounds import everything_whole, of_plan, of_sharded_plan, weights_sharded
from benchmarks.systems.group import check_same_losses
from benchmarks.systems.nobody_else import RANK, EchoStore
from benchmarks.systems.subjects import groups, hosts, possible
from benchmarks.tables.hosts import hosts_time
from benchmarks.tables.plot_systems import Bar, draw_bars, memory_bars, time_bars
from benchmarks.tables.systems import growth, memory_and_bytes, scaling, times
from sdp_deepspeed.config import MODES
from sdp_deepspeed.distributed.store_gatherer import StoreGatherer
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit


def plan_of(regime: Any) -> Plan:
    """Four ranks; a unit of 12 elements on three of them, one of 4 (half of a tensor) on one; 4 more are shared."""
    units = (
        Unit("a", (Piece("a", None, 0, 12),)),
        Unit("b", (Piece("b", 0, 0, 1), Piece("buffer", 0, 0, 1, "buffer"))),
    )
    return Plan(regime, "block", 4, None, 0, units, ((0, 1, 2), (3,)), (0, 1, 2, 3))


SHAPES = {"a": (3, 4), "b": (2, 4)}


@pytest.mark.parametrize(
    ("regime", "expected"),
    [
        # each holder of a: 8 elements to other owners; 4 are its own, for two more; the shared 4: 3 there, 3 back
        ("forward", (2 * (8 + 3) + 4 * (8 + 3), 2 * (0 + 3) + 4 * (0 + 3))),
        ("backward", (2 * (8 + 3) + 4 * (12 + 3), 2 * (0 + 3) + 4 * (12 + 3))),
    ],
)
def test_fewest_bytes_of_a_plan(regime: str, expected: tuple[float, float]) -> None:
    """Gradients of two bytes, weights of four."""
    found = [of_plan(plan_of(regime), SHAPES, rank, wire=2, weights=4) for rank in range(4)]
    assert found == pytest.approx([expected[0]] * 3 + [expected[1]])


@pytest.mark.parametrize(
    ("last", "of_a", "shared"),
    [
        # each holder of a, of the 12 elements: 8 to others at each gathering, 8 gradients; the shared 4: 3 and 3
        ("b", 8 * (2 + 2 * 4), 3 * (2 + 4)),
        ("a", 8 * (2 + 4), 3 * (2 + 4)),
    ],
)
def test_fewest_bytes_over_fsdp2(last: str, of_a: float, shared: float) -> None:
    """Gradients of two bytes, weights of four; b has one holder, who sends nothing of it."""
    plan = plan_of("forward")
    found = [of_sharded_plan(plan, SHAPES, rank, last=last, wire=2, weights=4) for rank in range(4)]
    assert found == pytest.approx([of_a + shared] * 3 + [shared])


def test_fewest_bytes_of_others() -> None:
    assert everything_whole(100, 4, wire=2, weights=4) == 75 * 6
    assert weights_sharded(80, 20, 4, wire=2, weights=4) == 60 * 10 + 15 * 6
    assert everything_whole(100, 1, wire=2, weights=4) == 0


def test_who_is_measured() -> None:
    found = groups(MODES, (0, 1, 2), (1, 0.75, 0.5, 0.25))
    assert len(found) == 1 + 12 + 1
    assert [subject.name for subject in found["plain"]] == [
        *("DDP", "DDP, activation checkpointing", "ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2")
    ]
    assert [subject.name for subject in found["backward x neuron, stage 2"]] == [
        *("DDP", "ZeRO-2"),
        *(f"backward x neuron + ZeRO-2 C={coverage}" for coverage in ("1", "0.75", "0.5", "0.25")),
    ]
    assert possible((1, 0.75, 0.5, 0.25), 2) == [1, 0.5]
    cells = ["block{} C=1", "block{} C=0.5", "neuron{} C=0.5"]
    assert [subject.name for subject in hosts(MODES, (0, 1, 2), (1, 0.5))] == [
        *("DDP", "FSDP2", "ZeRO-3"),
        *(f"forward x {cell.format(' + ' + host)}" for host in ("FSDP2", "ZeRO-1", "ZeRO-2") for cell in cells),
    ]


def test_another_loss_than_that_of_the_same_training_is_refused() -> None:
    """C = 1 trains what FSDP2 does; a subnetwork has a loss of its own, the same over every host."""
    subjects = hosts(MODES[:1], (1,), (1, 0.5))
    losses = {name: 2.0 if name.endswith("C=0.5") else 1.0 for name in (subject.name for subject in subjects)}
    figures = {name: [{"losses": [3.0, loss]}, {"losses": [4.0, loss]}] for name, loss in losses.items()}
    check_same_losses(subjects, figures)
    for name, first in (("+ FSDP2 C=1", "DDP"), ("+ ZeRO-1 C=0.5", r"forward x block \+ FSDP2 C=0.5")):
        for loss, words in ((1e-4, "1.0e-04"), (float("nan"), "nan")):
            own = [{"losses": [3.0, losses[f"forward x block {name}"]]}]
            other = [{"losses": [4.0, losses[f"forward x block {name}"] + loss]}]
            changed = figures | {f"forward x block {name}": own + other}
            with pytest.raises(RuntimeError, match=f"does not train what {first} does: their losses differ by {words}"):
                check_same_losses(subjects, changed)


@pytest.mark.parametrize(("num_ranks", "has_modes"), [(1, False), (2, True), (3, False), (4, True)])
def test_who_makes_collectives(num_ranks: int, has_modes: bool) -> None:
    """Half of one rank or of three is none, which the plan would refuse."""
    found = possible_contestants(0.5, num_ranks)
    assert [contestant.stage for contestant in found if contestant.mode is None] == [0, 1, 2]
    assert {contestant.mode for contestant in found if contestant.mode} == (set(MODES) if has_modes else set())


def test_a_world_of_echoes() -> None:
    """What a rank gathers there, others said too; nobody is waited for, and nobody has left."""
    store = EchoStore()
    ranks = StoreGatherer(store, "engine/1", (RANK, 512), what="a test", seconds=1)
    assert ranks.gather_objects({"a": 1}) == [{"a": 1}] * 512
    assert ranks.gather_objects("b") == ["b"] * 512
    assert not store.check(["engine/1/left"])
    assert [store.add("engines/3", 1) for _ in range(2)] == [1, 2]


def figures(scale: float) -> dict[str, Any]:
    """Of two ranks; the second has more of everything."""
    parts = {name: scale * second for name, second in zip(("forward", "backward", "exchange"), (1, 2, 4), strict=True)}
    sizes = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "peak"), 2**20)
    ranks = [
        {name: int(scale * times * size) for name, size in sizes.items()}
        | {"sent": 1_000_000 * times, "bound": 800_000, "calls": {"allreduce_": 3, "barrier": times}}
        for times in (1, 2)
    ]
    splits = [[parts | {"optimizer": 0.0, "host": host} for host in (0.0, 0.016)]]
    seconds = [scale, scale, 2 * scale]
    return {"seconds": seconds, "cpu_seconds": [[1.0, 2.0]] * 3, "splits": splits, "ranks": ranks}


def facts(**more: Any) -> dict[str, Any]:
    arguments = {"micro_batch": 1, "bucket": 2e6, "precision": "fp32", "repeats": 3, "sequences": 8}
    same = {"ranks": 2, "device": "CPU", "model": {"num_parameters": 1_500_000}, "sequence_length": 8}
    return same | {"baseline": "DDP", "arguments": arguments, "provenance": {"cores": 2}} | more


def test_systems_by_hand() -> None:
    """The state is that of the second rank; 3 MB are sent where 1.6 must be; times are ratios of the same repeat."""
    subjects = {"DDP": figures(1.0), "ZeRO-1": figures(2.0), "forward x block + ZeRO-1 C=0.5": figures(0.5)}
    content = {"plain": {"subjects": {"DDP": figures(1.0)}}, "forward x block, stage 1": {"subjects": subjects}}
    memory, times_ = (make(facts(groups=content)).splitlines() for make in (memory_and_bytes, times))
    run = "2 ranks, 1.5M parameters in fp32, batch 1 x 8 per rank, buckets of 2M elements"
    assert memory[0] == f"{run}; MiB, of the rank with the most:"
    assert len(memory) == len(times_) == 2 + 2 + 3, "the baseline is there once"
    ours = "| forward x block + ZeRO-1, C = 1/2 |"
    assert memory[-1] == f"{ours} 1.0 | 1.0 | 1.0 | 3.0 | 1.0 | 1.0 | 2.00 | 1.875 | 5 |"
    assert times_[-1] == f"{ours} 500 | 1000 | 0.50 (0.50 to 0.50) | 0.25 (0.25 to 0.25) | 500 | 1000 | 2000 | 0 | 8 |"
    assert times_[4].startswith("| DDP | 1000 | 1000 | 1 |  |")


def test_hosts_by_hand() -> None:
    """Shares of plain FSDP2's steps; over a link also what crossed it, of the node with the most."""
    both = {"DDP": figures(1.0), "FSDP2": figures(2.0)}
    linked = {name: of | {"link_use": [{"bytes": 1e6}, {"bytes": 2.5e6}]} for name, of in both.items()}
    ours = {"forward x block + FSDP2 C=0.5": figures(0.5)}
    both = {"DDP": both["DDP"], **ours, "FSDP2": both["FSDP2"]}
    runs = [
        ({"hosts": {"load": 3, "subjects": linked}}, "1gbit"),
        ({"hosts": {"load": 0.25, "subjects": both}}, None),
    ]
    lines = hosts_time(*(facts(groups=groups_, link=link) for groups_, link in runs)).splitlines()
    assert lines[0].startswith("1.5M parameters in fp32, batch 1 x 8 per rank")
    assert lines[0].endswith("the machine's load when the runs began: 3.0, 0.2:")
    assert lines[2] == "|  | 2 ranks, 1gbit, ms | share | MB over the link | 2 ranks, ms | share |"
    half = "0.50 (0.50 to 0.50)"
    assert lines[4:] == [
        f"| DDP | 1000 | {half} | 2.5 | 1000 | {half} |",
        "| forward x block + FSDP2, C = 1/2 |  |  |  | 500 | 0.25 (0.25 to 0.25) |",
        "| FSDP2 | 2000 | 1 | 2.5 | 2000 | 1 |",
    ]


def test_steps_that_were_not_split_have_no_parts() -> None:
    content = {"hosts": {"subjects": {"DDP": figures(1.0) | {"splits": []}}}}
    assert times(facts(groups=content)).endswith("| DDP | 1000 | 1000 | 1 |  |  |  |  |  |  |")


def test_scaling_by_hand() -> None:
    one = facts(ranks=1, ways={"strong": {"subjects": {"DDP": figures(1.0)}}})
    two = facts(ways={"strong": {"subjects": {"DDP": figures(0.5), "FSDP2": figures(2.0)}}})
    lines = scaling(one, two).splitlines()
    assert lines[0].startswith("strong scaling, 2 cores, 8 sequences in all of 8, 1.5M parameters")
    assert lines[2] == "|  | 1 rank | 2 ranks |"
    assert lines[4:] == [
        "| DDP | 1000 (1000 to 2000); 1500; 1.5 | 500 (500 to 1000); 1500; 1.5 |",
        "| FSDP2 |  | 2000 (2000 to 4000); 1500; 1.5 |",
    ]


def test_scaling_on_a_gpu_says_so() -> None:
    ways = {"strong": {"subjects": {"DDP": figures(1.0)}}}
    assert scaling(facts(device="NVIDIA X", ways=ways)).startswith("strong scaling, NVIDIA X, 8 sequences")


class Panel:
    """Keeps what is drawn on it."""

    def __init__(self) -> None:
        self.bars: list[tuple[Any, ...]] = []
        self.marks: tuple[Any, ...] = ()

    def barh(self, names: list[str], lengths: list[float], *, left: list[float], label: str, color: str) -> None:
        self.bars.append((names, lengths, left, label, color))

    def plot(self, *marks: Any, label: str) -> None:
        self.marks = (*marks, label)


def test_bars_of_other_minutes_by_hand() -> None:
    """The second group's DDP took twice the first's time, so that its bars are half as long; ZeRO-1 is twice as slow as
    DDP, whose step was 1,000 ms among the plain ones. The parts are stacked in their order."""
    subjects = {"DDP": figures(2.0), "ZeRO-1": figures(4.0)}
    content = {"plain": {"subjects": {"DDP": figures(1.0)}}, "forward x block, stage 1": {"subjects": subjects}}
    result = facts(groups=content)
    ddp, zero = time_bars(result)
    assert (ddp.name, ddp.mark) == ("DDP", 1000)
    assert (zero.name, zero.mark) == ("ZeRO-1", 2000)
    parts = {"forward": 2000, "backward": 4000, "exchange": 8000, "optimizer": 0, "host": 4}
    assert zero.parts == pytest.approx(parts)
    assert [begin for _, begin, _ in zero.segments()] == pytest.approx([0, 2000, 6000, 14000, 14000])
    memory = memory_bars(result)[1]
    assert (memory.parts, memory.mark) == (
        dict.fromkeys(("weights", "gradients", "optimizer", "activations"), 8.0),
        8.0,
    )
    panel = Panel()
    draw_bars(panel, [Bar("a", {"x": 1, "y": 2}, 5.0), Bar("b", {"x": 3, "y": 4}, 6.0)], mark="step", colors="rg")
    names = ["a", "b"]
    assert panel.bars == [(names, [1, 3], [0, 0], "x", "r"), (names, [2, 4], [1, 3], "y", "g")]
    assert panel.marks == ([5.0, 6.0], names, "k|", "step")


def test_growth_by_hand() -> None:
    row = {"num_layers": 8, "building_seconds": 1.25, "seconds": [0.001, 0.002, 0.003], "calls": {"a": 2, "b": 1}}
    ours = row | {"name": "forward x block + ZeRO-1 C=0.5", "num_units": 16}
    eight = [row | {"name": "DDP", "num_subnetworks": None}, ours | {"num_subnetworks": 8}]
    many = [ours | {"num_subnetworks": 8}, ours | {"num_subnetworks": 64}]
    lines = growth({"ranks": 8, "results": eight}, {"ranks": 64, "results": many}).splitlines()
    cell, name = "2.0 (1.0 to 3.0); 3; 1.2", "forward x block + ZeRO-1, C = 1/2"
    assert lines[2] == "|  | layers | units | 8 ranks | 64 ranks |"
    assert lines[4:] == [
        f"| DDP | 8 |  | {cell} |  |",
        f"| {name}, k = 8 | 8 | 16 | {cell} | {cell} |",
        f"| {name}, k = 64 | 8 | 16 |  | {cell} |",
    ]
