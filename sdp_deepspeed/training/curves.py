"""A run's dense validation loss over tokens, FLOPs and time, from its metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp_deepspeed.messages import listed
from sdp_deepspeed.training.metrics_log import MetricsLog

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """One entry per evaluation of the dense model, in the order of steps.

    Args:
        label: of the run.
        losses: nats per token.
        tokens: trained by all ranks until then.
        seconds: of training until then; evaluations and checkpoints are left out.
        flops: of all ranks until then; None if no step of the run was measured.
    """

    label: str
    losses: tuple[float, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    flops: tuple[int, ...] | None


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Of a run, finished or not; none where there are none.

    Raises:
        ValueError: a line is none that a run writes; names it.
    """
    path = folder / "metrics.jsonl"
    records = MetricsLog(path, writes=False).read()
    for line, record in enumerate(records, start=1):
        if wrong := [key for key, kinds in _FIELDS.get(record.get("kind"), ()) if not _is_a(record.get(key), kinds)]:
            raise ValueError(f"{path}:{line}: {listed(wrong)}: missing, or not as a run writes it: remove this line")
    return records


_NUMBER = (int, float)
# What is read of a record, by its kind.
_FIELDS: Mapping[Any, Sequence[tuple[str, tuple[type, ...]]]] = {
    "train": (("seconds", _NUMBER), ("tokens_per_second", _NUMBER), ("timed", (bool,))),
    "evaluation": (("dense_validation_loss", (*_NUMBER, type(None))),),
    "figures": (("ranks", (list,)), ("first_step", (int, type(None)))),  # older runs lack the second
}


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def tokens_per_step(steps: Sequence[Record]) -> int | None:
    """From what each step recorded; None before the first step."""
    return round(steps[-1]["tokens_per_second"] * steps[-1]["seconds"]) if steps else None


def flops_per_step(ranks: Sequence[Mapping[str, Any]] | None) -> int | None:
    """Of all ranks, from their figures; None if they were not measured, or before FLOPs were."""
    if not ranks or any("flops" not in rank for rank in ranks):
        return None
    return sum(rank["flops"] for rank in ranks)


def flops_until(figures: Sequence[Record], step: int) -> int | None:
    """Of all ranks; None if a process of the run did not count.

    Each process measures one step, and another process of the same run may train at another coverage. So figures hold
    from their process's first step until the next one's; those that come first also for what was trained before.
    """
    rates = [flops_per_step(record["ranks"]) for record in figures]
    if not rates or any(rate is None for rate in rates):
        return None
    begins = [0, *(_steps_before(record) for record in figures[1:])]
    ends = [*begins[1:], step]
    pieces = zip(rates, begins, ends, strict=True)
    return sum((rate or 0) * max(0, min(end, step) - begin) for rate, begin, end in pieces)


def _steps_before(figures: Record) -> int:
    """Steps made before the process that measured these figures; it measures its second step where it has one."""
    first = figures.get("first_step")
    return (figures["step"] - 1 if first is None else first) - 1


def step_seconds(steps: Sequence[Record]) -> dict[int, float]:
    """By step. A process's first step and the one that is measured take longer than training does: the median of the
    others stands for them."""
    timed = [record["seconds"] for record in steps if record["timed"]]
    usual = statistics.median(timed) if timed else None
    return {r["step"]: r["seconds"] if r["timed"] or usual is None else usual for r in steps}


def curve_of(label: str, records: Sequence[Record]) -> Curve:
    """Of a run's records."""
    steps, figures = of_kind(records, "train"), of_kind(records, "figures")
    evaluations = [r for r in of_kind(records, "evaluation") if r["dense_validation_loss"] is not None]
    points = [record["step"] for record in evaluations]
    tokens, seconds = tokens_per_step(steps) or 0, step_seconds(steps)
    flops = [count for point in points if (count := flops_until(figures, point)) is not None]
    return Curve(
        label,
        losses=tuple(record["dense_validation_loss"] for record in evaluations),
        tokens=tuple(tokens * point for point in points),
        seconds=tuple(sum(value for step, value in seconds.items() if step <= point) for point in points),
        flops=tuple(flops) if len(flops) == len(points) else None,
    )
