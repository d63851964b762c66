"""Markdown tables of the learning study: dense validation losses at equal operations, and with few data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.rates import TUNING_SEED, of_one_rate
from benchmarks.tables.markdown import MIB, Result, table

Cells = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Figures:
    """Cells of one study without those of the tuning seed, each at one learning rate."""

    cells: Cells

    @classmethod
    def of(cls, result: Result, study: str) -> Figures:
        return cls([cell for cell in of_one_rate(result["cells"]) if cell["study"] == study])

    @property
    def budgets(self) -> list[int]:
        return sorted({cell["budget"] for cell in self.cells})

    def subjects(self, *, dense: bool) -> list[str]:
        """Data parallelism by its size, or all others by name."""
        found = {cell["subject"]: cell["parameters"] for cell in self.cells if is_dense(cell) == dense}
        return sorted(found, key=lambda name: (found[name], name)) if dense else sorted(found)

    def some(self, subject: str) -> dict[str, Any]:
        """Any cell of a subject, for what all of its cells have in common."""
        return max((cell for cell in self.cells if cell["subject"] == subject), key=lambda cell: cell["budget"])

    def losses(self, subject: str, budget: int, key: str = "loss") -> dict[int, float]:
        """By seed, at the end of the run; or its "best_loss", as if it had been stopped there."""
        return {
            cell["seed"]: cell[key] for cell in self.cells if (cell["subject"], cell["budget"]) == (subject, budget)
        }

    def rate(self, subject: str, budget: int) -> float:
        """The highest learning rate, which is that of all seeds."""
        here = (cell for cell in self.cells if (cell["subject"], cell["budget"]) == (subject, budget))
        return float(next(here)["rate"])

    def of_its_size(self, subject: str) -> str | None:
        """Data parallelism at a subject's size."""
        size = self.some(subject)["described"]["size"]
        same = (name for name in self.subjects(dense=True) if self.some(name)["described"]["size"] == size)
        return next(same, None)

    def best_size(self, budget: int) -> str | None:
        """Data parallelism that is better than each other size on the seeds that the two share; None if there is no
        such size, or if it is the smallest or the largest."""
        names = [name for name in self.subjects(dense=True) if self.losses(name, budget)]
        for name in names[1:-1]:
            gaps = (self.gaps(name, other, budget) for other in names if other != name)
            if all(found and statistics.mean(found) < 0 for found in gaps):
                return name
        return None

    def gaps(self, subject: str, other: str, budget: int) -> list[float]:
        """A subject's loss less another's, for each seed that both have."""
        one, two = self.losses(subject, budget), self.losses(other, budget)
        return [one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())]


def is_dense(cell: dict[str, Any]) -> bool:
    """Whether it is of plain data parallelism."""
    return cell["described"].keys() == {"size"}


def mean_and_error(values: Iterable[float], sign: str = "") -> str:
    """With the standard error where there are several, and how many there are."""
    found = list(values)
    if not found:
        return ""
    if len(found) == 1:
        return f"{found[0]:{sign}.3f}"
    return f"{statistics.mean(found):{sign}.3f} ± {standard_error(found):.3f} ({len(found)})"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of one value, which tells nothing of it."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def difference(figures: Figures, subject: str, other: str | None, budget: int) -> str:
    """Of losses with the same seed; below zero the subject is better."""
    if other is None or other == subject:
        return ""
    return mean_and_error(figures.gaps(subject, other, budget), sign="+")


def learning(result: Result, study: str = "text") -> str:
    """At equal operations: losses, and how far they are from data parallelism."""
    figures = Figures.of(result, study)
    parts = []
    for budget in figures.budgets:
        best = figures.best_size(budget)
        rows = [
            _row(figures, name, budget, best)
            for dense in (True, False)
            for name in _by_loss(figures, budget, dense=dense)
        ]
        heads = ["parameters", "million tokens", "peak, MiB", "rate", "loss", "less own size", "less best size"]
        parts.append(table([f"{budget:,} dense steps", *heads], rows))
    return "\n\n".join([_caption(figures), *parts])


def _by_loss(figures: Figures, budget: int, *, dense: bool) -> list[str]:
    there = [name for name in figures.subjects(dense=dense) if figures.losses(name, budget)]
    if dense:
        return there
    return sorted(there, key=lambda name: statistics.mean(figures.losses(name, budget).values()))


def _row(figures: Figures, subject: str, budget: int, best: str | None) -> list[str]:
    cell = next(cell for cell in figures.cells if (cell["subject"], cell["budget"]) == (subject, budget))
    return [
        subject,
        f"{cell['parameters'] / 1e6:.2f}M",
        f"{cell['tokens'] / 1e6:.2f}",
        f"{cell['peak_bytes'] / MIB:.1f}",
        f"{figures.rate(subject, budget):g}",
        mean_and_error(figures.losses(subject, budget).values()),
        difference(figures, subject, figures.of_its_size(subject), budget),
        difference(figures, subject, best, budget),
    ]


def _caption(figures: Figures) -> str:
    seconds = sum(cell["cpu_seconds"] for cell in figures.cells)
    seeds = len({cell["seed"] for cell in figures.cells})
    return (
        f"{len(figures.cells)} cells, {seeds} seed{'s' * (seeds > 1)}, {seconds / 60:.0f} CPU minutes; "
        "validation loss of the dense model in nats per byte, ± standard error (number of seeds):"
    )


FEW_DATA = ("few data", "fewer data")


def few_data(result: Result) -> str:
    """Where the same text is read many times: losses at the end of runs of several lengths, and the lowest."""
    studies = [Figures.of(result, study) for study in FEW_DATA]
    return "\n\n".join(_few_data(figures) for figures in studies if figures.cells)


def _few_data(figures: Figures) -> str:
    """A column for each length of a run, at the end of which the learning rate is zero; and the best, stopped early."""
    names = [name for dense in (True, False) for name in figures.subjects(dense=dense)]
    names.sort(key=lambda name: best_length(figures, name)[1])
    rows = []
    for name in names:
        budget, _ = best_length(figures, name)
        lowest = mean_and_error(figures.losses(name, budget, "best_loss").values())
        gain = difference_of_bests(figures, name, figures.of_its_size(name))
        peak = f"{figures.some(name)['peak_bytes'] / MIB:.1f}"
        losses = [mean_and_error(figures.losses(name, each).values()) for each in figures.budgets]
        rows.append([name, peak, f"{figures.rate(name, budget):g}", *losses, lowest, gain])
    size = figures.cells[0]["train_bytes"]
    columns = [f"{budget:,} dense steps" for budget in figures.budgets]
    heads = [f"{size // 1000} kB", "peak, MiB", "rate", *columns, "lowest on the way", "less its own size's"]
    return f"{_caption(figures)}\n\n" + table(heads, rows)


def best_length(figures: Figures, subject: str) -> tuple[int, float]:
    """The budget with the lowest mean loss at any time of the run, and that loss."""
    means = {
        budget: statistics.mean(losses.values())
        for budget in figures.budgets
        if (losses := figures.losses(subject, budget, "best_loss"))
    }
    best = min(means, key=means.__getitem__)
    return best, means[best]


def difference_of_bests(figures: Figures, subject: str, other: str | None) -> str:
    """Of lowest losses with the same seed, each at its subject's best length; below zero the subject is better."""
    if other is None or other == subject:
        return ""
    one, two = (figures.losses(name, best_length(figures, name)[0], "best_loss") for name in (subject, other))
    return mean_and_error((one[seed] - two[seed] for seed in sorted(one.keys() & two.keys())), sign="+")


def rates(result: Result) -> str:
    """What was tried on the tuning seed."""
    tried = [cell for cell in result["cells"] if cell["seed"] == TUNING_SEED]
    found: dict[tuple[str, str, int], dict[float, float]] = {}
    for cell in tried:
        key = (cell["study"], cell["subject"], cell["budget"])
        found.setdefault(key, {})[cell["rate"]] = cell["loss"]
    columns = sorted({cell["rate"] for cell in tried})
    rows = [
        [subject, study, str(budget), *(f"{losses[rate]:.3f}" if rate in losses else "" for rate in columns)]
        for (study, subject, budget), losses in sorted(found.items())
    ]
    minutes = sum(cell["cpu_seconds"] for cell in tried) / 60
    heads = ["", "study", "dense steps", *(f"rate {rate:g}" for rate in columns)]
    return f"{len(tried)} cells, {minutes:.0f} CPU minutes:\n\n" + table(heads, rows)


def learning_study(result: Result) -> str:
    """All of it."""
    studies = sorted({cell["study"] for cell in result["cells"] if cell["seed"] != TUNING_SEED} - {*FEW_DATA})
    parts = [f"{study}: {learning(result, study)}" for study in studies]
    return "\n\n".join([*parts, few_data(result), rates(result)])
