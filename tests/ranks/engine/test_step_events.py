"""What reaches DeepSpeed's monitors on two ranks: CSV, a stand-in for W&B, and TensorBoard where it is installed."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.ranks import Rank
from tests.helpers.training import engine_of, gathered, sgd, train

EVERY = 2  # steps
BATCH = 2 * 2 * 2  # samples of a step: ranks, micro-steps, samples of a micro-batch


class Wandb(ModuleType):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[tuple[dict[str, float], int]] = []
        self.options: dict[str, Any] = {}

    def init(self, **options: Any) -> None:
        self.options = options

    def log(self, data: dict[str, float], step: int, commit: Any = None) -> None:
        self.logged.append((data, step))


def monitors(rank: Rank, name: str) -> dict[str, Any]:
    where = {"enabled": True, "output_path": str(rank.folder), "job_name": name}
    settings = {"csv_monitor": where, "wandb": {"enabled": True, "project": "mine"}, "steps_per_print": EVERY}
    return settings | ({"tensorboard": where} if _has_tensorboard() else {})


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def written(rank: Rank, name: str) -> dict[str, dict[int, float]]:
    """By file, values by samples."""
    files = sorted((rank.folder / name).glob("*.csv"))
    tables = {path.stem: list(csv.reader(path.read_text().splitlines()))[1:] for path in files}
    return {name: {int(step): float(value) for step, value in rows} for name, rows in tables.items()}


def ours(rank: Rank) -> None:
    """Rank 1 has no monitor: rank 0 decides for both."""
    wandb = Wandb()
    sys.modules["wandb"] = wandb
    settings = sgd(2) | (monitors(rank, "ours") if rank.rank == 0 else {})
    engine = engine_of(settings)
    losses, norms = [], []
    for first in range(4):
        losses.append(train(engine, num_steps=1, accumulation=2, first=first))
        norms.append(engine.get_global_grad_norm())
    every = gathered(losses)
    events = written(rank, "ours")
    assert events.pop("Train_Samples_lr").keys() == {BATCH * step for step in range(1, 5)}
    steps = {BATCH * 2: 1, BATCH * 4: 3}
    assert all(values.keys() == steps.keys() for values in events.values()), events
    for samples, index in steps.items():
        mean = sum(loss for own in every for loss in own[index]) / 4
        assert events["Train_Samples_subnetwork_loss"][samples] == pytest.approx(mean, rel=1e-6)
        assert events["Train_Samples_gradient_norm"][samples] == pytest.approx(norms[index])
        assert events["Train_Samples_coverage"][samples] == pytest.approx(engine.coverage)
    if rank.rank == 0:
        assert wandb.options["project"] == "mine"
        _check_same(wandb, events)
        if _has_tensorboard():
            _check_tensorboard(rank, events)


def _check_same(wandb: Wandb, events: Mapping[str, Mapping[int, float]]) -> None:
    """W&B has what the CSV files have, and never goes back, which it would drop."""
    logged: dict[str, dict[int, float]] = {}
    for data, step in wandb.logged:
        for name, value in data.items():
            logged.setdefault(name.replace("/", "_"), {})[step] = value
    logged.pop("Train_Samples_lr")
    assert {name: pytest.approx(values) for name, values in events.items()} == logged
    assert [step for _, step in wandb.logged] == sorted(step for _, step in wandb.logged)


def _check_tensorboard(rank: Rank, events: Mapping[str, Mapping[int, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(rank.folder / "ours"))
    accumulator.Reload()
    tags = {tag.replace("/", "_"): tag for tag in accumulator.Tags()["scalars"]}
    for name, values in events.items():
        scalars = {event.step: event.value for event in accumulator.Scalars(tags[name])}
        assert scalars == pytest.approx(values, rel=1e-6), name


def a_plan_that_changes(rank: Rank) -> None:
    """A whole model's loss has another name."""
    sys.modules["wandb"] = Wandb()
    engine = engine_of(sgd(2) | monitors(rank, "changed"))
    train(engine, num_steps=2, accumulation=2)
    engine.replan({"coverage": 1.0})
    train(engine, num_steps=2, accumulation=2, first=2)
    gathered(None)
    events = written(rank, "changed")
    assert events["Train_Samples_subnetwork_loss"].keys() == {2 * BATCH}
    assert events["Train_Samples_train_loss"].keys() == {4 * BATCH}
    assert events["Train_Samples_coverage"] == pytest.approx({2 * BATCH: 0.5, 4 * BATCH: 1.0})


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (ours, a_plan_that_changes):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
