"""Fewest bytes by hand, and who is measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.collectives import possible_contestants
from benchmarks.systems.bounds import everything_whole, of_plan, of_sharded_plan, weights_sharded
from benchmarks.systems.group import check_same_losses
from benchmarks.systems.subjects import groups, hosts, possible
from sdp_deepspeed.config import MODES
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
