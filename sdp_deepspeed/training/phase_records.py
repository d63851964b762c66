"""What a run's records say of its schedule: which steps were made in which phase, and what a step of each one cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sdp_deepspeed.training.metrics_log import Record, of_kind


@dataclass(frozen=True)
class Span:
    """Consecutive steps of one phase.

    Args:
        begin: steps made before it.
        end: the last one's number; infinite while nothing came after.
        phase: the record of its beginning; None where steps were made without a schedule.
    """

    begin: int
    end: float
    phase: Record | None

    def has(self, record: Record) -> bool:
        """Whether a record is of one of its steps."""
        return self.begin < record["step"] <= self.end


def spans(records: Sequence[Record]) -> list[Span]:
    """The phases of a run in their order; one without a beginning for a run without a schedule. New draws of a phase
    belong to it."""
    begun: list[tuple[int, Record | None]] = [(0, None)]
    for record in of_kind(records, "phase"):
        last = begun[-1][1]
        if last is None or _method(last) != _method(record):
            begun.append((record["step"], record))
    ends = [*(begin for begin, _ in begun[1:]), math.inf]
    return [Span(begin, end, phase) for (begin, phase), end in zip(begun, ends, strict=True) if begin < end]


def _method(record: Record) -> tuple[Any, ...]:
    return record["phase"], record["method"], record["stage"]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Median and tenths of `values`; None for fewer than two."""
    if len(values) < 2:
        return None
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1], "num_steps": len(values)}


def phase_reports(records: Sequence[Record]) -> list[dict[str, Any]] | None:
    """For each phase in which steps were made: its name, how many, and as in a report of its own their figures and
    times. None for a run without a schedule."""
    if not of_kind(records, "phase"):
        return None
    reports = []
    for span in spans(records):
        own = [record for record in records if span.has(record)]
        steps, figures = of_kind(own, "train"), of_kind(own, "figures")
        if steps:
            reports.append(
                {
                    "label": "before the schedule" if span.phase is None else span.phase["method"],
                    "coverage": None if span.phase is None else span.phase["coverage"],
                    "steps": len(steps),
                    "step_seconds": spread([record["seconds"] for record in steps if record["timed"]]),
                    "ranks": figures[-1]["ranks"] if figures else None,
                }
            )
    return reports


def label_of(records: Sequence[Record], num_steps: int) -> str | None:
    """A short name of what a run did in its steps, such as "SDP 2/4, then dense + ZeRO-1"; None for one without a
    schedule."""
    made = [span.phase for span in spans(records) if span.phase is not None and span.begin < num_steps]
    if not made:
        return None
    methods = [phase["method"] for phase in made]
    stages = [phase["stage"] for phase in made]
    if len({*stages}) == 1:
        return f"{_then(methods)} + ZeRO-{stages[0]}"
    return _then([f"{method} + ZeRO-{stage}" for method, stage in zip(methods, stages, strict=True)])


def _then(names: Sequence[str]) -> str:
    different = [name for name, _ in groupby(names)]
    if len(different) > 4:  # the columns of a table
        different = [different[0], f"{len(different) - 2} others", different[-1]]
    return ", then ".join(different)


def mean_coverage(reports: Sequence[Mapping[str, Any]]) -> float | None:
    """C over the steps of a schedule; None if there are others."""
    return mean_over_steps(reports, [report["coverage"] for report in reports])


def mean_over_steps(reports: Sequence[Mapping[str, Any]], values: Sequence[float | None]) -> float | None:
    """Of one value for each phase, weighed by its steps; None if one is missing."""
    steps = [report["steps"] for report in reports]
    known = [value for value in values if value is not None]
    if len(known) < len(steps) or not any(steps):
        return None
    return sum(value * count for value, count in zip(known, steps, strict=True)) / sum(steps)
