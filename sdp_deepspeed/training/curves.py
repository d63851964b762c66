"""A run's dense validation loss over tokens or images, FLOPs and time, from its metrics.jsonl."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp_deepspeed.messages import listed
from sdp_deepspeed.training.metrics_log import MetricsLog, Record, of_kind
from sdp_deepspeed.training.phase_records import spans


@dataclass(frozen=True)
class Curve:
    """One entry per evaluation of the dense model, in the order of steps.

    Args:
        label: of the run.
        losses: nats per token.
        amounts: tokens, or images, that all ranks trained until then.
        seconds: of training until then; evaluations and checkpoints are left out.
        flops: of all ranks until then; None if not all phases of the run were measured.
        items: "tokens" or "images".
    """

    label: str
    losses: tuple[float, ...]
    amounts: tuple[int, ...]
    seconds: tuple[float, ...]
    flops: tuple[int, ...] | None
    items: str = "tokens"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Of a run, finished or not; none where there are none.

    Raises:
        ValueError: a line is none that a run writes; names it.
    """
    path = folder / "metrics.jsonl"
    records = MetricsLog(path, writes=False).read()
    for line, record in enumerate(records, start=1):
        fields = _FIELDS.get(record.get("kind"), ())
        if record.get("kind") == "train":
            fields = (*fields, (f"{items_of(record)}_per_second", _NUMBER))
        if wrong := [key for key, kinds in fields if not _is_a(record.get(key), kinds)]:
            raise ValueError(f"{path}:{line}: {listed(wrong)}: missing, or not as a run writes it: remove this line")
    return records


_NUMBER = (int, float)
# What is read of a record, by its kind.
_FIELDS: Mapping[Any, Sequence[tuple[str, tuple[type, ...]]]] = {
    "train": (("seconds", _NUMBER), ("timed", (bool,))),
    "evaluation": (("dense_validation_loss", (*_NUMBER, type(None))),),
    "figures": (("ranks", (list,)), ("first_step", (int, type(None)))),  # older runs lack the second
    "phase": (
        *(("phase", (int,)), ("method", (str,)), ("stage", (int,))),
        *(("coverage", _NUMBER), ("seconds", (*_NUMBER, type(None)))),
    ),
}


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def items_of(record: Record) -> str:
    """What a step's record counts: "images" or "tokens"."""
    return "images" if "images_per_second" in record else "tokens"


def items_per_step(steps: Sequence[Record]) -> int | None:
    """Tokens, or images, from what each step recorded; None before the first step."""
    return round(steps[-1][f"{items_of(steps[-1])}_per_second"] * steps[-1]["seconds"]) if steps else None


def flops_per_step(ranks: Sequence[Mapping[str, Any]] | None) -> int | None:
    """Of all ranks, from their figures; None if they were not measured, or before FLOPs were."""
    if not ranks or any("flops" not in rank for rank in ranks):
        return None
    return sum(rank["flops"] for rank in ranks)


@dataclass(frozen=True)
class _Rate:
    """FLOPs of all ranks in each step after `begin`, up to `end`; None if they were not counted."""

    begin: int
    end: float
    flops: int | None


def flops_until(records: Sequence[Record], step: int) -> int | None:
    """Of all ranks, in all steps up to this one; None if steps of some phase, or process, were not counted."""
    return _sum_until(_rates(records), step)


def _rates(records: Sequence[Record]) -> list[_Rate]:
    """Each process measures one step in each phase, and another process of the same run may train at another coverage.

    So figures hold from their process's first step in the phase until the next one's; those that come first also for
    what was trained before, in this phase.
    """
    figures, rates = of_kind(records, "figures"), list[_Rate]()
    for span in spans(records):
        own = [record for record in figures if span.has(record)]
        begins = [span.begin, *(max(span.begin, _steps_before(record)) for record in own[1:])]
        counts = [flops_per_step(record["ranks"]) for record in own] or [None]
        rates += map(_Rate, begins, [*begins[1:], span.end], counts)
    return rates


def _sum_until(rates: Sequence[_Rate], step: int) -> int | None:
    total = 0
    for rate in rates:
        if (num_steps := int(min(rate.end, step)) - rate.begin) > 0:
            if rate.flops is None:
                return None
            total += rate.flops * num_steps
    return total


def _steps_before(figures: Record) -> int:
    """Steps made before those that these figures hold for; a process measures its second step where it has one."""
    first = figures.get("first_step")
    return (figures["step"] - 1 if first is None else first) - 1


def step_seconds(records: Sequence[Record]) -> dict[int, float]:
    """By step, with the re-planning after it. The first step of a phase, or process, and the one that is measured take
    longer than training does: the median of the phase's others stands for them."""
    steps, seconds = of_kind(records, "train"), dict[int, float]()
    for span in spans(records):
        own = [record for record in steps if span.has(record)]
        timed = [record["seconds"] for record in own if record["timed"]]
        usual = statistics.median(timed) if timed else None
        seconds |= {r["step"]: r["seconds"] if r["timed"] or usual is None else usual for r in own}
    for record in of_kind(records, "phase"):
        if record["step"] in seconds:
            seconds[record["step"]] += record["seconds"] or 0.0
    return seconds


def curve_of(label: str, records: Sequence[Record]) -> Curve:
    """Of a run's records."""
    evaluations = [r for r in of_kind(records, "evaluation") if r["dense_validation_loss"] is not None]
    points = [record["step"] for record in evaluations]
    steps, seconds, rates = of_kind(records, "train"), step_seconds(records), _rates(records)
    in_step = items_per_step(steps) or 0
    flops = [count for point in points if (count := _sum_until(rates, point)) is not None]
    return Curve(
        label,
        losses=tuple(record["dense_validation_loss"] for record in evaluations),
        amounts=tuple(in_step * point for point in points),
        seconds=tuple(sum(value for step, value in seconds.items() if step <= point) for point in points),
        flops=tuple(flops) if len(flops) == len(points) else None,
        items=items_of(steps[-1]) if steps else "tokens",
    )
