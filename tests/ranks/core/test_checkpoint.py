"""A checkpoint of one layout goes on with another: the same masters, moments and buffers, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdp_deepspeed.core.checkpoint.manager import CheckpointManager
from sdp_deepspeed.core.checkpoint.peers import give_state, take_state
from sdp_deepspeed.core.checkpoint.state import written_state
from tests.helpers.core_training import Layout, dense_of, dense_tensors, muon, sgd, training
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.training import assert_identical, gathered, refusal

pytestmark = pytest.mark.slow  # the engine's own tests come by the same way

NEURON, LAYERS, BACKWARD = {"strategy": "neuron"}, {"granularity": "layer"}, {"regime": "backward"}
BY_RULES = {"holders": [{"units": "mlp", "holders": 1}, {"holders": 2}]}
BF16 = torch.bfloat16
WRITERS = {
    "forward_block": Layout(2),
    "neuron_zero2_small_buckets": Layout(2, stage=2, block=NEURON, bucket_size=100),
    "backward_neuron_stage0_bf16": Layout(2, stage=0, dtype=BF16, block=NEURON | BACKWARD),
    "three_bf16_by_rules": Layout(3, dtype=BF16, block=BY_RULES),
    "replicas": Layout(4, block={"subnetworks": 2}),
    "tensor_parallel": Layout(4, tp=2, block={"strategy": {"attention": "block", "mlp": "neuron"}}),
}
READERS = {
    "dense": Layout(2, block={"holders": 2}),
    "three_holders_of_three_zero2": Layout(3, stage=2, block=NEURON | {"holders": 2}),
    "stage0_layers": Layout(2, stage=0, block=LAYERS),
    "backward_block_bf16": Layout(2, dtype=BF16, block=BACKWARD),
    "backward_neuron_by_rules": Layout(3, stage=2, block=BACKWARD | NEURON | BY_RULES, bucket_size=64),
    "four_replicas": Layout(4, block={"subnetworks": 2}),
    "tensor_parallel_bf16": Layout(4, tp=2, dtype=BF16),
    "offload": Layout(2, offload=True),
    "alone": Layout(1, block={"holders": 1, "subnetworks": 1}),
}


def write(layout: Layout, name: str, folder: Path, rank: Rank) -> None:
    with training(layout) as run:
        run.train(3)
        CheckpointManager().save(folder / name, "global_step3", run.state, {"position": 3})
        parts = gathered(written_state(run.state))
        if rank.rank == 0:
            assert_identical(dense_tensors(folder / name / "global_step3"), dense_of(parts))


def read(layout: Layout, source: str, folder: Path, rank: Rank) -> None:
    """What was loaded is what is saved again, and the weights are its rounding."""
    with training(layout) as run:
        run.train(1, seed=7)
        loaded = CheckpointManager().load(folder / source, None, run.state)
        assert loaded is not None
        assert loaded.common == {"position": 3}
        parts, stored = gathered(written_state(run.state)), dense_tensors(folder / source / "global_step3")
        if rank.rank == 0:
            assert_same_run(stored, dense_of(parts))
        for pieces in run.mask.pieces.values():
            for piece, _ in pieces:
                if run.mask.stored(piece):
                    expected = piece.narrow(run.own_part(piece.parameter, stored)).to(layout.dtype)
                    assert torch.equal(run.mask.view(piece), expected), piece
        state = run.optimizer.optimizer.state
        assert {float(own["step"]) for own in state.values()} <= {3.0}
        assert all(map(torch.isfinite, torch.tensor(run.train(1))))


def assert_same_run(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit; frozen weights and buffers in the precision of the run that has them."""
    assert before.keys() == after.keys()
    assert {key.partition("/")[0] for key in before} == {"weight", "exp_avg", "exp_avg_sq"}
    assert_identical({key: value.to(after[key].dtype) for key, value in before.items()}, after)


def draw() -> list[float]:
    """One number from each source of randomness."""
    return [torch.rand(1).item(), float(np.random.rand()), random.random()]


def an_interrupted_run_goes_on(rank: Rank) -> None:
    """Bit for bit: losses, weights, masters, moments, each rank's own buffers and random numbers."""
    for number, layout in enumerate(
        [
            Layout(2, stage=0),
            Layout(2, block=BACKWARD),
            Layout(2, dtype=BF16, block=NEURON),
            Layout(2, stage=2, dtype=BF16, block=BACKWARD | NEURON),
            Layout(2, optimizer=muon),
        ]
    ):
        for asynchronous in (False, True):
            folder = rank.folder / f"{number}{asynchronous}"
            manager = CheckpointManager(asynchronous=asynchronous)
            with training(layout) as run:
                run.train(3)
                torch.manual_seed(rank.rank)
                manager.save(folder, "tag", run.state, {})
                numbers, losses = draw(), run.train(3)
                manager.wait()
                expected = run.tensors()
            with training(layout) as run:
                run.train(1, seed=9)  # its state is not the initial one
                assert manager.load(folder, None, run.state) is not None
                assert draw() == numbers
                run.steps = 3
                assert run.train(3) == losses
                assert_identical(run.tensors(), expected)
            manager.close()


def before_the_first_step(rank: Rank) -> None:
    """There are no moments yet; those of the run that loads go."""
    with training(Layout(2)) as run:
        CheckpointManager().save(rank.folder, "tag", run.state, {})
        losses = run.train(2)
    with training(Layout(2)) as run:
        run.train(1, seed=9)
        CheckpointManager().load(rank.folder, "tag", run.state)
        run.steps = 0
        assert run.train(2) == losses


def parts_of_a_checkpoint(rank: Rank) -> None:
    """Without optimizer states moments and options stay; masters are those of the checkpoint."""
    manager = CheckpointManager()
    with training(Layout(2, dtype=BF16)) as run:
        run.train(2)
        manager.save(rank.folder, "whole", run.state, {})
        manager.save(rank.folder, "trained", run.state, {}, exclude_frozen=True)
        expected = run.tensors()
    with training(Layout(2, dtype=BF16)) as run:
        run.train(1, seed=4)
        before = run.tensors()
        manager.load(rank.folder, "whole", run.state, optimizer_states=False)
        after = run.tensors()
        assert_identical(after, {k: before[k] if k.startswith(("exp_avg", "step")) else expected[k] for k in expected})
        load = partial(manager.load, rank.folder, "trained", run.state)
        refusal(ValueError, load, "1 tensors are missing", "model.norm.weight")
        load(strict=False)
    with training(Layout(2, optimizer=sgd)) as run:
        before = run.tensors()
        load = partial(manager.load, rank.folder, "whole", run.state)
        refusal(ValueError, load, "optimizer state in the checkpoint is of Adam", "SGD")
        assert_identical(run.tensors(), before)
        load(optimizer_states=False)
        run.train(1)


def options_of_groups(rank: Rank) -> None:
    """Those of the checkpoint, but how to step; param groups stay the objects that they are."""
    manager = CheckpointManager()
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
    manager = CheckpointManager()
    layouts = [layout for layout in (WRITERS | READERS).values() if layout.size == rank.size]
    for index, (old, new) in enumerate(zip(layouts, [*layouts[1:], layouts[0]], strict=True)):
        layout = replace(new, dtype=old.dtype)
        with training(old) as run:
            run.train(2)
            manager.save(rank.folder / str(index), "tag", run.state, {})
            taken = take_state(run.state)
            run.end()
        with training(layout) as loaded:
            manager.load(rank.folder / str(index), "tag", loaded.state)
            expected = loaded.tensors()
        with training(layout, run) as other:
            give_state(taken, other.state, torch.device("cpu"))
            assert_identical(other.tensors(), expected)
            other.train(1)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Of all writers, then of all readers, with one set of ranks for each number."""
    folder = tmp_path_factory.mktemp("checkpoints")
    result: dict[str, str | None] = {}
    for size in (2, 3, 4):
        checks = [
            (name, partial(write, layout, name, folder)) for name, layout in WRITERS.items() if layout.size == size
        ]
        result |= run_ranks(size, checks)
    for size in (1, 2, 3, 4):
        readers: list[Any] = [
            (f"{source}-{name}", partial(read, layout, source, folder))
            for name, layout in READERS.items()
            if layout.size == size
            for source in _sources(name, request.config)
        ]
        result |= run_ranks(size, readers)
    return result


def _sources(reader: str, options: pytest.Config) -> Iterator[str]:
    """Of each reader one, so that each writer is read; all with --full."""
    first = list(READERS).index(reader)
    for index, source in enumerate(WRITERS):
        if options.getoption("--full") or (index - first) % len(WRITERS) == 2:
            yield source


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pair" in metafunc.fixturenames:
        pairs = [f"{source}-{name}" for name in READERS for source in _sources(name, metafunc.config)]
        metafunc.parametrize("pair", [*WRITERS, *pairs])


def test_layouts(pair: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[pair] is None, outcomes[pair]


def _checks(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    yield "moved", moved
    if size == 2:
        for check in (an_interrupted_run_goes_on, before_the_first_step, parts_of_a_checkpoint, options_of_groups):
            yield check.__name__, check


@pytest.mark.checks((2, 3), _checks)
def test_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
