"""Tables of the learning study: dense validation losses at equal FLOPs, compared with data parallelism."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.cells import TUNING_SEED

# Subjects of the table in docs/results.md. Those of SDP hold the first and the last layer on all ranks, multiply what
# branches add by 1 / C and start with smaller output projections, unless a label says otherwise. The first is the base
# of differences.
LABELS = {
    "dense 64x8": "data parallelism",
    "dense 64x8, 2 rows": "data parallelism, half the rows, twice the steps",
    "dense 64x4": "data parallelism, half the depth",
    "C=3/4, scaled": "SDP, C = 3/4",
    "C=1/2, whole ends, scaled in training": "SDP, C = 1/2",
    "C=1/2, no whole ends, scaled": "SDP, C = 1/2, no whole ends",
    "C=1/2, neurons, scaled": "SDP, C = 1/2, neurons, no whole ends",
    "C=1/4, whole ends, scaled in training": "SDP, C = 1/4",
    "C=1/4, no whole ends, scaled": "SDP, C = 1/4, no whole ends",
    "C=1/4, whole ends": "SDP, C = 1/4, unscaled",
}
IN_README = (
    "dense 64x8",
    "dense 64x4",
    "C=1/2, whole ends, scaled in training",
    "C=1/4, whole ends, scaled in training",
)


def tuned_rate(cells: Sequence[Mapping[str, Any]], study: str, subject: str) -> float | None:
    """The best of the longest runs with the tuning seed; None without such runs."""
    key = (study, subject, TUNING_SEED)
    tried = [cell for cell in cells if (cell["study"], cell["subject"], cell["seed"]) == key]
    longest = max((cell["budget"] for cell in tried), default=None)
    last = [cell for cell in tried if cell["budget"] == longest and math.isfinite(cell["loss"])]
    best = min(last, key=lambda cell: cell["loss"], default=None)
    return None if best is None else float(best["rate"])


@dataclass(frozen=True)
class Figures:
    """Cells of one study without those of the tuning seed, each subject at one learning rate: the tuned one, or else
    that with the most seeds, of these the best."""

    cells: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, result: Mapping[str, Any], study: str) -> Figures:
        groups: dict[tuple[str, int], dict[float, list[Mapping[str, Any]]]] = {}
        for cell in result["cells"]:
            if cell["study"] == study and cell["seed"] != TUNING_SEED:
                groups.setdefault((cell["subject"], cell["budget"]), {}).setdefault(cell["rate"], []).append(cell)
        found: list[Mapping[str, Any]] = []
        for (subject, _), by_rate in groups.items():
            most = max(by_rate.values(), key=lambda own: (len(own), -statistics.mean(cell["loss"] for cell in own)))
            found += by_rate.get(tuned_rate(result["cells"], study, subject) or 0.0, most)
        return cls(found)

    @property
    def budgets(self) -> list[int]:
        return sorted({cell["budget"] for cell in self.cells})

    def losses(self, subject: str, budget: int) -> dict[int, float]:
        """By seed, at the end of the run."""
        return {
            cell["seed"]: cell["loss"] for cell in self.cells if (cell["subject"], cell["budget"]) == (subject, budget)
        }

    def gaps(self, subject: str, other: str, budget: int) -> list[float]:
        """A subject's loss minus another's, for each common seed; negative if the subject is better."""
        one, two = self.losses(subject, budget), self.losses(other, budget)
        return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]

    @staticmethod
    def error(values: Sequence[float]) -> float:
        """Standard error of the mean; 0 for one value."""
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def quality_rows(
    figures: Figures, costs: Mapping[str, Mapping[str, float]], subjects: Iterable[str], from_budget: int
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: for each budget the final loss, in parentheses minus that of the first row; then peak memory, and
    all that is sent at the largest budget, relative to the first row.

    Args:
        costs: of recipe_costs.py.
        subjects: of `LABELS`, the base first.
        from_budget: the shortest that is shown.
    """
    base, *_ = subjects = list(subjects)
    budgets = [b for b in figures.budgets if b >= from_budget and any(figures.losses(name, b) for name in subjects)]
    rows = []
    for subject in subjects:
        losses = [_loss_and_gap(figures, subject, base, budget) for budget in budgets]
        peak = costs[subject]["peak"] / costs[base]["peak"]
        sent = _sent(figures, costs, subject) / _sent(figures, costs, base)
        rows.append([LABELS[subject], *losses, f"{peak:.2f}", f"{sent:.2f}"])
    return [*(f"{budget:,} steps" for budget in budgets), "peak", "sent"], rows


def _sent(figures: Figures, costs: Mapping[str, Mapping[str, float]], subject: str) -> float:
    """Bytes of a rank for each FLOP of the budget."""
    cell = max((c for c in figures.cells if c["subject"] == subject), key=lambda cell: cell["budget"])
    return float(costs[subject]["sent"] * cell["steps"] / cell["budget"])


def _loss_and_gap(figures: Figures, subject: str, base: str, budget: int) -> str:
    losses = figures.losses(subject, budget)
    if not losses:
        return ""
    gaps = figures.gaps(subject, base, budget) if subject != base else []
    return f"{statistics.mean(losses.values()):.3f} ({_mean(gaps, sign='+')})" if gaps else _mean(losses.values())


def many_passes_rows(figures: Mapping[int, Figures]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: for each number of passes the loss at the end, in parentheses the lowest if the run had better
    been stopped there.

    Args:
        figures: by depth.
    """
    passes = sorted({_passes(cell) for own in figures.values() for cell in own.cells})
    rows = []
    for depth, own in figures.items():
        for subject, label in _labels(depth).items():
            cells = [[c for c in own.cells if (c["subject"], _passes(c)) == (subject, count)] for count in passes]
            if any(cells):
                rows.append([label, *map(_end_and_lowest, cells)])
    return [f"{count} passes" for count in passes], rows


def _labels(depth: int) -> dict[str, str]:
    """Of the subjects at a depth."""
    half = depth // 2
    return {
        f"dense 32x{depth}": f"{depth} layers",
        f"32x{depth}, stochastic depth 0.2": f"{depth} layers, stochastic depth 0.2",
        f"dense 32x{half}": f"{half} layers",
        f"32x{half}, dropout 0.1": f"{half} layers, dropout 0.1",
        f"32x{depth}, C=1/2, re-drawn every 20 steps": f"{depth} layers, C = 1/2, re-drawn",
        f"32x{depth}, C by depth, re-drawn every 20 steps": f"{depth} layers, C by depth, re-drawn",
    }


def _passes(cell: Mapping[str, Any]) -> int:
    """Of data parallelism over the text with the cell's budget."""
    settings = cell["settings"]
    row_bytes = cell["described"]["size"]["length"]
    return round(cell["budget"] * settings["num_workers"] * settings["rows"] * row_bytes / settings["train_bytes"])


def _end_and_lowest(cells: Sequence[Mapping[str, Any]]) -> str:
    if not cells:
        return ""
    end, lowest = (_mean(cell[key] for cell in cells) for key in ("loss", "best_loss"))
    return end if end == lowest else f"{end} ({lowest})"


def _mean(values: Iterable[float], sign: str = "") -> str:
    """With the standard error where there are several."""
    found = list(values)
    if not found:
        return ""
    error = f" ± {Figures.error(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):{sign}.3f}{error}"
