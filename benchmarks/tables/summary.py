"""One small Markdown table for a newcomer: what the method saves and what it costs beside ZeRO."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common.models import num_parameters
from benchmarks.tables.counts import KINDS, worst_share
from benchmarks.tables.markdown import MIB, Result, coverage, per_repeat, table
from sdp_deepspeed import config

MODES = [str(mode) for mode in config.MODES if mode.strategy == "block"]
PRECISION = "bf16"


def summary(half: Result, whole: Result, stage_1: Result, stage_2: Result) -> str:
    """Memory, traffic and time of ZeRO-1 and ZeRO-2 and of the method on top of each.

    Args:
        half, whole: peaks of memory at C = 1/2 and at C = 1.
        stage_1, stage_2: step times at the stage, at both coverages.
    """
    rows = []
    for stage, times in ((1, stage_1), (2, stage_2)):
        plain = _memory(half, f"ZeRO-{stage}")
        rows.append([f"ZeRO-{stage}", *_cells(plain, plain), "1x"])
        for memory, mode, name in _contestants(half, whole, stage):
            step = f"{mode} C={memory['arguments']['coverage']:g}"
            rows.append([name, *_cells(_memory(memory, f"{mode} + ZeRO-{stage}"), plain), f"{_time(times, step):.2f}x"])
    caption = (
        f"{half['num_ranks']} workers. Memory and bytes: {num_parameters(half['model']) / 1e6:.0f}M parameters in "
        f"{PRECISION}, of the worker with the most. Step time: {stage_1['model']['num_parameters'] / 1e6:.1f}M "
        "parameters in fp32, median share of ZeRO's."
    )
    heads = (
        "model state",
        "peak in a step",
        f"peak / budget (at most {half['limit']:g})",
        "sent per step",
        "step time",
    )
    return f"{caption}\n\n" + table(["", *heads], rows)


def _contestants(half: Result, whole: Result, stage: int) -> Iterator[tuple[Result, str, str]]:
    """The result that has it, its mode, and how its row is called."""
    for result in (half, whole):
        for mode in MODES:
            yield result, mode, f"{mode}, {coverage(result['arguments']['coverage'])}, + ZeRO-{stage}"


def _memory(result: Result, name: str) -> dict[str, Any]:
    (row,) = (row for row in result["results"] if (row["name"], row["precision"]) == (name, PRECISION))
    return row


def _cells(row: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Model state, peak, share of the budget, bytes sent; with their ratio to plain ZeRO's."""
    texts = []
    for size, base, unit, name in zip(_sizes(row), _sizes(plain), (MIB, MIB, 1e6), ("MiB", "MiB", "MB"), strict=True):
        texts.append(f"{size / unit:.0f} {name}" + (f" ({size / base:.2f}x)" if row is not plain else ""))
    state, peak, sent = texts
    return [state, peak, f"{worst_share(row).share:.2f}", sent]


def _sizes(row: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of model state, at the peak, and sent: each of the rank with the most."""
    ranks = row["ranks"]
    states = [sum(rank[kind] for kind in KINDS) for rank in ranks]
    return max(states), max(rank["peak"] for rank in ranks), max(rank["sent"] for rank in ranks)


def _time(result: Result, name: str) -> float:
    """Of the baseline's step time, the median over repeats."""
    return statistics.median(per_repeat(result["seconds"][name], result["seconds"][result["baseline"]]))
