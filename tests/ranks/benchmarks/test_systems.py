"""Everybody of benchmarks/side_by_side.py on a tiny model: bytes by hand; a step's parts on a clock that is moved."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import scaling, side_by_side, vision
from benchmarks.common.models import num_parameters
from benchmarks.systems import split
from benchmarks.systems.group import measure
from benchmarks.systems.images import RESNET_18
from benchmarks.systems.options import MODELS, setting_of
from benchmarks.systems.subjects import groups, hosts
from benchmarks.tables.systems import PARTS
from sdp_deepspeed.config import MODES
from tests.helpers.ranks import Rank

pytestmark = pytest.mark.slow

SHAPE = MODELS["tiny"]
LAYERS = num_parameters(SHAPE) - num_parameters(SHAPE | {"num_hidden_layers": 0})
BYTES = 4 * num_parameters(SHAPE)
LARGEST = 4 * 64 * 32
COUNTERS = 4 * 21  # the optimizer's step counters, one per parameter
TRIED = (MODES[0], MODES[-1])
PADDING = 64 * 4 * 8  # bytes, of a few shards that start at multiples of 64 elements


def options(**changed: Any) -> argparse.Namespace:
    few = {"model": "tiny", "sequence": 8, "precision": "fp32", "bucket": 1e5, "warmup": 0, "repeats": 2, "splits": 1}
    return argparse.Namespace(**few | {"micro_batch": 1} | changed)


def refused(words: str) -> Any:
    """By a line of the first rank."""
    return pytest.raises(SystemExit, match=f"error: .*{words}" if dist.get_rank() == 0 else "2")


def the_plain_ones_hold_and_send_what_they_must(_rank: Rank) -> None:
    found = measure(groups(MODES[:1], (1,), (1.0,))["plain"], setting_of(options(), 1))
    names = ["DDP", "DDP, activation checkpointing", "ZeRO-1", "ZeRO-3", "FSDP2"]
    assert list(found) == names
    for mine in (found[name]["ranks"][dist.get_rank()] for name in names):
        assert mine["peak"] > mine["weights"] + mine["gradients"] + mine["optimizer"]
    ddp, again, zero1, zero3, fsdp2 = (found[name]["ranks"][dist.get_rank()] for name in names)
    assert ddp["weights"] == BYTES
    assert BYTES <= ddp["gradients"] <= BYTES + LARGEST, "a gradient is copied into its bucket"
    assert 2 * BYTES <= ddp["optimizer"] <= 2 * BYTES + COUNTERS
    assert again["activations"] < ddp["activations"] / 2
    for mine in (ddp, again):  # the second one's has nothing of the first
        state = mine["weights"] + mine["gradients"] + mine["optimizer"]
        assert mine["peak"] < 1.1 * (state + mine["activations"])
    assert ddp["sent"] - ddp["bound"] == again["sent"] - again["bound"] == 0
    assert ddp["bound"] == BYTES  # half of it there, half of it back
    assert zero1["sent"] == pytest.approx(1.5 * zero1["bound"], rel=0.01), "it all-reduces gradients"
    for sharded, optimizer in ((zero3, 3), (fsdp2, 2)):  # ZeRO-3 keeps a master of fp32 weights too
        assert sharded["weights"] == pytest.approx(BYTES / 2, rel=0.01)
        assert sharded["gradients"] == pytest.approx(BYTES / 2, rel=0.01)
        assert sharded["optimizer"] == pytest.approx(optimizer * BYTES / 2, rel=0.01)
        assert sharded["bound"] == BYTES + 4 * (LAYERS / 2) / 2, "of two layers the last need not come again"
    assert BYTES <= zero3["sent"] <= 1.01 * zero3["bound"], "it keeps up to two layers, and there are no more"
    assert fsdp2["sent"] == pytest.approx(fsdp2["bound"] + 4 * (LAYERS / 2) / 2, rel=0.01), "it comes again"


def the_method_sends_no_more_than_it_must(_rank: Rank) -> None:
    """Within 1% and padding."""
    few = {"modes": list(map(str, TRIED)), "stages": [1], "coverages": [1, 0.75, 0.5], "only": " x "}
    output = _rank.folder / "systems.json"
    arguments = options(**few, repeats=2, output=str(output))
    result = side_by_side.measure_groups(arguments)
    again = side_by_side.measure_groups(arguments)
    assert json.dumps(again) == json.dumps(result), "what is there is not measured again"
    with refused("is of a run with another --stages: name"):
        side_by_side.measure_groups(options(**few | {"stages": [2]}, output=str(output)))
    with (
        mock.patch.dict(os.environ, {"SDP_LINK_RATE": "1gbit"}),
        refused("--splits: got 1 between namespaces"),
    ):
        side_by_side.measure_groups(arguments)
    assert list(result["groups"]) == [f"{mode}, stage 1" for mode in TRIED]
    for content in result["groups"].values():
        names = list(content["subjects"])
        assert names[:2] == ["DDP", "ZeRO-1"]
        assert [name[-5:] for name in names[2:]] == ["1 C=1", "C=0.5"], "three quarters of two ranks are none"
        for name in names[2:]:
            for rank in content["subjects"][name]["ranks"]:
                assert 0 < rank["bound"] <= rank["sent"] <= 1.01 * rank["bound"] + PADDING, (name, rank)


def the_method_over_fsdp2_beside_the_others(_rank: Rank) -> None:
    """Losses are compared inside. It stores 16 bytes for each parameter, spread over the ranks, whatever the coverage,
    and has no more in its step than plain FSDP2, whose layers are two units here."""
    subjects = hosts((MODES[0], MODES[1]), (1,), (1, 0.5))
    found = measure(subjects, setting_of(options(warmup=1, repeats=1, splits=1), 1))
    plain = found["FSDP2"]["ranks"][dist.get_rank()]
    num_layers_calls = 3 * SHAPE["num_hidden_layers"]
    for subject in (subject for subject in subjects if "+ FSDP2" in subject.name):
        mine = found[subject.name]["ranks"][dist.get_rank()]
        state = mine["weights"] + mine["gradients"] + mine["optimizer"]
        assert state == pytest.approx(4 * BYTES / 2, rel=0.01), subject.name
        assert mine["peak"] <= 1.01 * plain["peak"], subject.name
        assert mine["bound"] <= mine["sent"] <= mine["bound"] + 4 * (LAYERS / 2) / 2 + PADDING, "the last layer again"
    assert sum(found["forward x block + FSDP2 C=1"]["ranks"][0]["calls"].values()) == 2 * num_layers_calls + 2 + 1
    half = found["forward x block + FSDP2 C=0.5"]["ranks"][dist.get_rank()]
    assert half["calls"] == {"_allgather_base_": 1, "_reduce_scatter_base_": 1, "allreduce_": 1}, "the shared, the norm"


def both_ways_to_scale(_rank: Rank) -> None:
    names = [subject.name for subject in scaling.subjects(2)]
    assert names == ["DDP", "ZeRO-1", "FSDP2", "forward x block + ZeRO-1 C=1", "forward x block + ZeRO-1 C=0.5"]
    last = scaling.subjects(2)[-1:]
    with mock.patch.object(scaling, "subjects", return_value=last):
        result = scaling.measure_ways(options(sequences=4))
    assert {way: content["micro_batch"] for way, content in result["ways"].items()} == {"strong": 2, "weak": 1}
    for content in result["ways"].values():
        for figures in content["subjects"].values():
            assert [len(spent) for spent in figures["cpu_seconds"]] == [2, 2]
    with refused("--sequences: 3 cannot be shared by 2 ranks"):
        scaling.measure_ways(options(sequences=3))


def image_classifiers(_rank: Rank) -> None:
    """The only state of the optimizer is its momentum. No quarter of two ranks; losses are compared inside."""
    model = _rank.folder / f"digits_{_rank.rank}.json"
    model.write_text(json.dumps(RESNET_18 | {"embedding_size": 16, "stage_sizes": [16, 32], "depths": [3, 3]}))
    few = {"model": model, "micro_batch": 4, "size": 8, "bucket": 1e5, "warmup": 0, "repeats": 2}
    result = vision.measured(argparse.Namespace(**few))
    found = {name: figures["ranks"][dist.get_rank()] for name, figures in result["subjects"].items()}
    assert list(found) == ["DDP", "ZeRO-1", *(f"{mode} + ZeRO-1 C=0.5" for mode in MODES)]
    size, ddp = 4 * result["model"]["num_parameters"], found.pop("DDP")
    assert ddp["weights"] == ddp["optimizer"] == ddp["sent"] == ddp["bound"] == size
    zero1 = found.pop("ZeRO-1")
    assert (zero1["flops"], zero1["sent"]) == (ddp["flops"], pytest.approx(1.5 * size, rel=0.01))
    for name, mine in found.items():
        assert mine["bound"] <= mine["sent"] < size, name
        assert mine["flops"] < ddp["flops"], name
        assert (mine["weights"] < size / 1.2) == name.startswith("forward"), name
    with refused("--model: .*no.json"):
        vision.measured(argparse.Namespace(**few | {"model": model.with_name("no.json")}))


class Clock:
    """Moves when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


class Slow(torch.optim.SGD):
    """Each step takes four seconds."""

    clock: Clock

    def step(self, closure: Any = None) -> Any:
        self.clock.move(4)


class Outer(torch.optim.Optimizer):
    """Wraps another, beside which its own step takes sixteen seconds."""

    def __init__(self, inner: Slow) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        self.inner.clock.move(16)
        self.inner.step()


class Engine:
    """Forward takes one second, backward two; in each is a collective."""

    def __init__(self, clock: Clock) -> None:
        self.clock, parameter = clock, torch.nn.Parameter(torch.ones(1))
        inner = Slow([parameter], lr=1.0)
        inner.clock = clock
        self.optimizer = Outer(inner)

    def __call__(self, **_batch: torch.Tensor) -> Any:
        self.clock.move(1)
        dist.all_reduce(torch.ones(1))
        return mock.Mock()

    def backward(self, _loss: Any) -> None:
        self.clock.move(2)
        dist.all_reduce(torch.ones(1))

    def step(self) -> None:
        self.optimizer.step()
        dist.all_reduce(torch.ones(1))


def parts_by_hand(_rank: Rank) -> None:
    """Every wait takes eight seconds, of which there are three; the outer optimizer's own time is the host's."""
    clock = Clock()
    unbox = dist.Work.unbox

    def slowly(boxed: Any) -> Any:
        unbox(boxed).wait()
        return mock.Mock(wait=lambda: clock.move(8))

    with mock.patch.object(split, "seconds", clock), mock.patch.object(dist.Work, "unbox", slowly):
        parts = split.split_step(Engine(clock), torch.ones(1))
    assert tuple(parts) == PARTS
    assert parts == {"forward": 1, "backward": 2, "exchange": 24, "optimizer": 4, "host": 16}


def _cases(_size: int, _options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        parts_by_hand,
        the_plain_ones_hold_and_send_what_they_must,
        the_method_sends_no_more_than_it_must,
        the_method_over_fsdp2_beside_the_others,
        both_ways_to_scale,
        image_classifiers,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
