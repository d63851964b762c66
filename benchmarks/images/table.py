"""Rows of the image study's table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.cells import TUNING_SEED
from benchmarks.images.subjects import SUBJECTS
from benchmarks.quality import Figures

BASE = "18 blocks"


def image_rows(cells: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: test loss, minus that of data parallelism with all blocks for the same seeds, and error; then
    peak memory and all that is sent, relative to the same.

    Args:
        cells: without those that only chose learning rates, if there are any.
    """
    cells = [cell for cell in cells if cell["seed"] != TUNING_SEED and not cell["diverged"]]
    budgets = sorted({(cell["images"], cell["epochs"]) for cell in cells})
    rows = []
    for subject in SUBJECTS:
        of_subject = [_of(cells, subject, budget) for budget in budgets]
        of_base = [_of(cells, BASE, budget) for budget in budgets]
        if any(of_subject):
            figures = [_figures(subject, *pair) for pair in zip(of_subject, of_base, strict=True)]
            rows.append([subject, *figures, *_costs(of_subject, of_base)])
    return [*(f"{images:,} images, {epochs} epochs" for images, epochs in budgets), "peak", "sent"], rows


def _of(cells: Sequence[Mapping[str, Any]], subject: str, budget: tuple[int, int]) -> dict[int, Mapping[str, Any]]:
    """Cells by seed."""
    return {
        cell["seed"]: cell for cell in cells if (cell["subject"], (cell["images"], cell["epochs"])) == (subject, budget)
    }


def _figures(subject: str, cells: Mapping[int, Any], base: Mapping[int, Any]) -> str:
    if not cells:
        return ""
    last = {seed: cell["curve"][-1] for seed, cell in cells.items()}
    gaps = [last[seed]["test_loss"] - base[seed]["curve"][-1]["test_loss"] for seed in last if seed in base]
    gap = f" ({_mean(gaps, '+.3f')})" if gaps and subject != BASE else ""
    error = _mean([100 * point["test_error"] for point in last.values()], ".1f")
    return f"{_mean([point['test_loss'] for point in last.values()], '.3f')}{gap}; {error}%"


def _mean(values: Sequence[float], form: str) -> str:
    """With the standard error where there are several."""
    error = f" ± {Figures.error(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{error}"


def _costs(of_subject: Sequence[Mapping[int, Any]], of_base: Sequence[Mapping[int, Any]]) -> list[str]:
    """Of the first budget that both have."""
    for cells, base in zip(of_subject, of_base, strict=True):
        if cells and base:
            one, other = (next(iter(found.values())) for found in (cells, base))
            peak = one["costs"]["peak"] / other["costs"]["peak"]
            sent = one["costs"]["sent"] * one["steps"] / (other["costs"]["sent"] * other["steps"])
            return [f"{peak:.2f}", f"{sent:.2f}"]
    return ["", ""]
