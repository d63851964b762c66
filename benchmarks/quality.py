"""Tables of the learning study: dense validation losses at equal FLOPs, compared with data parallelism."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TUNING_SEED = 99  # only for choosing learning rates; excluded from figures

# Rows of the table: subjects and their labels.
LABELS = {
    "dense 64x8": "data parallelism, 0.41M",
    "forward x block, C=0.5": "C = 1/2",
    "forward x block, C=0.5, dense tail 50%": "C = 1/2, then dense",
    "C=1/2, whole ends": "C = 1/2, whole ends",
    "C=1/2, dense tail 50%, whole ends": "C = 1/2, whole ends, then dense",
    "C=1/4, whole ends": "C = 1/4, whole ends",
    "C=1/4, dense tail 50%, whole ends": "C = 1/4, whole ends, then dense",
    "dense 128x8": "data parallelism, 1.6M",
    "128x8, C=1/4, whole ends": "1.6M, C = 1/4, whole ends",
    "128x8, C=1/4, dense tail 50%, whole ends": "1.6M, C = 1/4, whole ends, then dense",
    "128x8, C=1/2, dense tail 50%, whole ends": "1.6M, C = 1/2, whole ends, then dense",
}
FEW_DATA = {
    "dense 64x8": "data parallelism, 0.41M",
    "dense 64x4": "data parallelism, 0.21M",
    "branch dropout 0.2": "data parallelism, branch dropout 0.2",
    "C=1/2, scaled": "C = 1/2, scaled",
    "C=1/2, scaled, whole ends": "C = 1/2, scaled, whole ends",
    "C=3/4, scaled, drawn every 10 steps": "C = 3/4, scaled, re-drawn every 10 steps",
}


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
    that with the most seeds."""

    cells: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, result: Mapping[str, Any], study: str) -> Figures:
        groups: dict[tuple[str, int], dict[float, list[Mapping[str, Any]]]] = {}
        for cell in result["cells"]:
            if cell["study"] == study and cell["seed"] != TUNING_SEED:
                groups.setdefault((cell["subject"], cell["budget"]), {}).setdefault(cell["rate"], []).append(cell)
        found: list[Mapping[str, Any]] = []
        for (subject, _), by_rate in groups.items():
            most = max(by_rate.values(), key=len)
            found += by_rate.get(tuned_rate(result["cells"], study, subject) or 0.0, most)
        return cls(found)

    @property
    def budgets(self) -> list[int]:
        return sorted({cell["budget"] for cell in self.cells})

    def losses(self, subject: str, budget: int, key: str = "loss") -> dict[int, float]:
        """Losses by seed, at the end of the run, or its "best_loss", as if it had been stopped there."""
        return {
            cell["seed"]: cell[key] for cell in self.cells if (cell["subject"], cell["budget"]) == (subject, budget)
        }

    def best_size(self, budget: int) -> str | None:
        """Data parallelism at the size with the lowest mean loss, if it is neither the smallest nor the largest."""
        sizes = {cell["subject"]: cell["parameters"] for cell in self.cells if cell["described"].keys() == {"size"}}
        names = [name for name in sorted(sizes, key=lambda name: sizes[name]) if self.losses(name, budget)]
        means = {name: statistics.mean(self.losses(name, budget).values()) for name in names}
        best = min(means, key=lambda name: means[name], default=None)
        return best if best in names[1:-1] else None

    def of_its_size(self, subject: str) -> str:
        """Data parallelism at a subject's size."""
        size = next(cell for cell in self.cells if cell["subject"] == subject)["described"]["size"]
        return f"dense {size['width']}x{size['depth']}"

    def gaps(self, subject: str, other: str, budget: int) -> list[float]:
        """A subject's loss minus another's, for each common seed; negative if the subject is better."""
        one, two = self.losses(subject, budget), self.losses(other, budget)
        return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]

    def best_length(self, subject: str) -> tuple[int, dict[int, float]]:
        """The budget with the lowest mean loss at any time of its run, and the losses by seed."""
        found = {budget: self.losses(subject, budget, "best_loss") for budget in self.budgets}
        best = min((b for b in found if found[b]), key=lambda budget: statistics.mean(found[budget].values()))
        return best, found[best]

    @staticmethod
    def error(values: Sequence[float]) -> float:
        """Standard error of the mean; 0 for one value."""
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def quality_rows(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: for each budget the final loss, and in brackets less data parallelism's of the same size."""
    budgets = [budget for budget in figures.budgets if budget >= 250]
    rows = []
    for subject, label in LABELS.items():
        cells = [_loss_and_gap(figures, subject, budget) for budget in budgets]
        if any(cells):
            rows.append([label, *cells])
    best = ["data parallelism, best size"]
    for budget in budgets:
        name = figures.best_size(budget)
        best.append(f"{_mean(figures.losses(name, budget).values())} ({name.split()[1]})" if name else "")
    return [f"{budget:,} steps" for budget in budgets], [*rows, best]


def _loss_and_gap(figures: Figures, subject: str, budget: int) -> str:
    losses = figures.losses(subject, budget)
    if not losses:
        return ""
    gaps = figures.gaps(subject, figures.of_its_size(subject), budget)
    is_own = figures.of_its_size(subject) == subject
    return _mean(losses.values()) + ("" if is_own or not gaps else f" ({_mean(gaps, sign='+')})")


def few_data_rows(figures: Figures) -> list[list[str]]:
    """Each at its best length, stopped at its lowest loss: length, loss, less that of its size's data parallelism."""
    rows = []
    for subject, label in FEW_DATA.items():
        if not any(cell["subject"] == subject for cell in figures.cells):
            continue
        budget, losses = figures.best_length(subject)
        _, own = figures.best_length(figures.of_its_size(subject))
        gaps = [losses[seed] - own[seed] for seed in sorted(losses.keys() & own.keys())]
        is_own = figures.of_its_size(subject) == subject
        rows.append([label, f"{budget:,}", _mean(losses.values()), "" if is_own else _mean(gaps, sign="+")])
    return rows


def _mean(values: Iterable[float], sign: str = "") -> str:
    """With the standard error where there are several."""
    found = list(values)
    if not found:
        return ""
    error = f" ± {Figures.error(found):.3f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):{sign}.3f}{error}"
