"""Checkpoints of a sharded optimizer: what the engine's own tests (../checkpoint) do not show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from sdp_deepspeed.checkpoint.checkpointer import Checkpointer
from sdp_deepspeed.checkpoint.reshard import collect_state, load_state
from tests.helpers.core_training import Layout, muon, training
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical

NEURON, BACKWARD = {"strategy": "neuron"}, {"regime": "backward"}
BY_RULES = {"holders": [{"units": "mlp", "holders": 1}, {"holders": 2}]}
BF16 = torch.bfloat16
LAYOUTS = (
    Layout(2),
    Layout(2, stage=2, block=NEURON, bucket_size=100),
    Layout(2, stage=0, dtype=BF16, block=NEURON | BACKWARD),
    Layout(2, stage=0, block={"granularity": "layer"}),
    Layout(2, dtype=BF16, block=BACKWARD),
    Layout(2, offload=True),
    Layout(2, block={"holders": 2}),
    Layout(3, dtype=BF16, block=BY_RULES),
    Layout(3, stage=2, block=NEURON | {"holders": 2}),
    Layout(3, stage=2, block=BACKWARD | NEURON | BY_RULES, bucket_size=64),
)


def whole_matrices_go_on(rank: Rank) -> None:
    """Bit for bit, with Muon."""
    manager, layout = Checkpointer(), Layout(2, optimizer=muon)
    with training(layout) as run:
        run.train(3)
        manager.save(rank.folder, "tag", run.state, {})
        losses, expected = run.train(3), run.tensors()
    with training(layout) as run:
        run.train(1, seed=9)  # its state is not the initial one
        manager.load(rank.folder, "tag", run.state)
        run.steps = 3
        assert run.train(3) == losses
        assert_identical(run.tensors(), expected)


def before_the_first_step(rank: Rank) -> None:
    """There are no moments yet; those of the run that loads go."""
    with training(Layout(2)) as run:
        Checkpointer().save(rank.folder, "tag", run.state, {})
        losses = run.train(2)
    with training(Layout(2)) as run:
        run.train(1, seed=9)
        Checkpointer().load(rank.folder, "tag", run.state)
        run.steps = 0
        assert run.train(2) == losses


def options_of_groups(rank: Rank) -> None:
    """Those of the checkpoint, but how to step; param groups stay the objects that they are."""
    manager = Checkpointer()
    with training(Layout(2)) as run:
        for group in run.optimizer.optimizer.param_groups:
            group.update(lr=0.5, initial_lr=0.7, foreach=True)
        manager.save(rank.folder, "tag", run.state, {})
    with training(Layout(2)) as run:
        groups = [*run.optimizer.optimizer.param_groups]
        manager.load(rank.folder, "tag", run.state)
        assert [id(g) for g in groups] == [id(g) for g in run.optimizer.optimizer.param_groups]
        assert [(g["lr"], g["initial_lr"], g["foreach"]) for g in groups] == [(0.5, 0.7, None)] * 2


def moved(rank: Rank) -> None:
    """From memory to memory, in place: the same as saved and loaded, whatever both layouts are."""
    manager = Checkpointer()
    layouts = [layout for layout in LAYOUTS if layout.size == rank.size]
    for index, (old, new) in enumerate(zip(layouts, [*layouts[1:], layouts[0]], strict=True)):
        layout = replace(new, dtype=old.dtype)
        with training(old) as run:
            run.train(2)
            manager.save(rank.folder / str(index), "tag", run.state, {})
            taken = collect_state(run.state)
            run.end()
        with training(layout) as loaded:
            manager.load(rank.folder / str(index), "tag", loaded.state)
            expected = loaded.tensors()
        with training(layout, run) as other:
            load_state(taken, other.state, torch.device("cpu"))
            assert_identical(other.tensors(), expected)
            other.train(1)


def _checks(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    yield "moved", moved
    if size == 2:
        for check in (whole_matrices_go_on, before_the_first_step, options_of_groups):
            yield check.__name__, check


@pytest.mark.slow  # the engine's own tests come by the same way
@pytest.mark.checks((2, 3), _checks)
def test_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
