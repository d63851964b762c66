"""What reaches DeepSpeed's monitors on two ranks: CSV, a stand-in for W&B, and TensorBoard where it is installed."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.common.measured_step import measured_step
from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.engine.held_bytes import storage_bytes, weight_tensors
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
    meetings: list[int] = []
    gather = engine.world._objects.gather_objects

    def counted(value: object) -> list[Any]:
        meetings.append(engine.global_steps)
        return gather(value)

    engine.world._objects.gather_objects = counted
    losses, norms = [], []
    for first in range(5):
        with measured_step(engine) if first == 4 else nullcontext():  # which gives the engine's `step` back
            losses.append(train(engine, num_steps=1, accumulation=2, first=first))
        norms.append(engine.get_global_grad_norm())
    assert meetings == [2, 4], "a meeting in each step that is written, and in no other"
    with TrafficCounter() as traffic:
        train(engine, num_steps=1, accumulation=2, first=5)
    of_all = gathered((losses, traffic.bytes_by_operator["alltoall_base_"], storage_bytes(weight_tensors(engine))))
    dist.barrier()
    events = written(rank, "ours")
    assert events.pop("Train_Samples_lr").keys() == {BATCH * step for step in range(1, 7)}
    steps = {BATCH * 2: 1, BATCH * 4: 3, BATCH * 6: 5}
    assert all(values.keys() == steps.keys() for values in events.values()), events
    for samples, index in list(steps.items())[:2]:
        mean = sum(loss for own, *_ in of_all for loss in own[index]) / 4
        assert events["Train_Samples_subnetwork_loss"][samples] == pytest.approx(mean, rel=1e-6)
        assert events["Train_Samples_gradient_norm"][samples] == pytest.approx(norms[index])
        assert events["Train_Samples_sent_bytes"][samples] == max(sent for _, sent, _ in of_all) > 0
        assert events["Train_Samples_memory_weights_bytes"][samples] == max(weights for *_, weights in of_all)
        assert events["Train_Samples_memory_gradients_bytes"][samples] > 0
        least, most = (events[f"Train_Samples_exchange_seconds_{which}"][samples] for which in ("least", "most"))
        assert 0 < least <= most <= events["Train_Samples_step_seconds"][samples]
        assert events["Train_Samples_slowest_rank"][samples] in (0, 1)
        assert events["Train_Samples_slowest_over_median"][samples] >= 1
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


def a_step_that_ends_with_a_replan(rank: Rank) -> None:
    """What is written is of before it, as that of an engine that keeps its plan."""
    found, shared = [], list[int]()
    for name in ("kept", "changed"):
        sys.modules["wandb"] = Wandb()
        engine = engine_of(sgd(2) | monitors(rank, name))
        figures_of = engine.step_events._figures
        engine.step_events._figures = partial(_counting, engine.step_events, figures_of, shared)
        if name == "changed":
            engine.step_events._step = partial(_step_and_replan, engine)
        train(engine, num_steps=3, accumulation=2)
        assert engine.dp_group.meter is None
        assert engine.plan.is_whole == (name == "changed")
        dist.barrier()
        found.append(written(rank, name))
    assert shared == [4, 4], "two backward passes and two calls of step, in which ranks wait for each other"
    kept, changed = found
    for event in ("subnetwork_loss", "gradient_norm", "sent_bytes", "memory_weights_bytes", "memory_optimizer_bytes"):
        assert changed[f"Train_Samples_{event}"] == kept[f"Train_Samples_{event}"], event
    assert changed.keys() == kept.keys()
    waited, seconds = (
        changed[f"Train_Samples_{name}"][2 * BATCH] for name in ("exchange_seconds_most", "step_seconds")
    )
    assert 0 < waited <= seconds


def _counting(events: Any, figures_of: Any, shared: list[int]) -> Any:
    shared.append(len(events._watch._together))
    return figures_of()


def _step_and_replan(engine: Any) -> None:
    before = engine.global_steps
    type(engine).step(engine)
    if (before, engine.global_steps) == (1, EVERY):
        engine.replan({"coverage": 1.0})


def without_a_monitor(rank: Rank) -> None:
    engine = engine_of(sgd())
    assert engine.step_events is None
    assert not {"backward", "step", "train", "_replan"} & vars(engine).keys()
    assert engine.dp_group.meter is None


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (ours, a_step_that_ends_with_a_replan, without_a_monitor):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
