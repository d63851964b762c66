"""The learning study as plots: losses at equal operations over the size, the tokens and the memory of a worker."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.tables.canvas import new_figure, save
from benchmarks.tables.learning import FEW_DATA, Figures, standard_error
from benchmarks.tables.markdown import MIB, Result

_MARKERS = "xv^P*Xs<>dph12348"


@dataclass(frozen=True)
class Point:
    """
    Args:
        x: on the axis.
        loss: mean over seeds.
        error: of the mean; 0 with one seed.
        label: of what is not on the axis.
    """

    x: float
    loss: float
    error: float
    label: str


def plot_learning(result: Result, path: Path, study: str = "text") -> None:
    """Three panels. Over the size and over the memory a line is a budget, through all sizes of data parallelism; over
    the tokens it is a size, through all budgets. Everybody else has a marker of its own.

    Raises:
        ValueError: matplotlib is not installed, or `path` has an ending that it cannot write.
    """
    figures = Figures.of(result, study)
    figure = new_figure(18, 7)
    panels = figure.subplots(1, 3, sharey=True)
    dense, others = figures.subjects(dense=True), figures.subjects(dense=False)
    colors = {name: f"C{index}" for index, name in enumerate(dense)}
    markers = dict(zip(others, cycle(_MARKERS), strict=False))
    for panel, key in zip(panels, ("parameters", "peak_bytes"), strict=False):
        for index, budget in enumerate(figures.budgets):
            color = f"C{index}"
            _line(panel, at_budget(figures, dense, budget, key), color, f"data parallelism, {budget:,} dense steps")
            for name in others:
                _marks(panel, at_budget(figures, [name], budget, key), color, markers[name])
    panels[0].legend(fontsize="small")
    for name in dense:
        _line(panels[2], over_tokens(figures, name), colors[name], f"data parallelism, {name.removeprefix('dense ')}")
    for name in others:
        color = colors.get(figures.of_its_size(name) or "", "black")
        _marks(panels[2], over_tokens(figures, name), color, markers[name], name)
    for panel, label in zip(panels, ("parameters", "peak memory of a worker, MiB", "tokens"), strict=True):
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("dense validation loss, nats per byte")
    figure.legend(*panels[2].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save(figure, path)


def plot_few_data(result: Result, path: Path) -> None:
    """A panel for each size of the text: validation losses over the run, mean of the seeds; a line for everybody."""
    there = [study for study in FEW_DATA if Figures.of(result, study).cells]
    figure = new_figure(9 * len(there), 6)
    for panel, study in zip(figure.subplots(1, len(there), squeeze=False)[0], there, strict=True):
        figures = Figures.of(result, study)
        names = [*figures.subjects(dense=True), *figures.subjects(dense=False)]
        for name, marker in zip(names, cycle(_MARKERS), strict=False):
            shares, losses = curve(figures, name)
            panel.plot(shares, losses, marker=marker, markersize=4, label=name)
        panel.set_ylim(top=min(panel.get_ylim()[1], 2 * min(cell["best_loss"] for cell in figures.cells)))
        panel.set_title(f"{figures.cells[0]['train_bytes'] // 1000} kB of text")
        panel.set_xlabel("share of the steps")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")
    figure.axes[0].set_ylabel("dense validation loss, nats per byte")
    save(figure, path)


def curve(figures: Figures, name: str) -> tuple[list[float], list[float]]:
    """Shares of the longest run and mean losses there."""
    budget = figures.some(name)["budget"]
    cells = [cell for cell in figures.cells if (cell["subject"], cell["budget"]) == (name, budget)]
    steps = [point["step"] / cells[0]["steps"] for point in cells[0]["curve"]]
    found = zip(*([point["loss"] for point in cell["curve"]] for cell in cells), strict=True)
    return steps, [statistics.mean(losses) for losses in found]


def at_budget(figures: Figures, names: Sequence[str], budget: int, key: str) -> list[Point]:
    """Of those that have this budget, by what is on the axis."""
    found = [_point(figures, name, budget, key, name.removeprefix("dense ")) for name in names]
    return sorted((point for point in found if point is not None), key=lambda point: point.x)


def over_tokens(figures: Figures, name: str) -> list[Point]:
    """Of one subject at all budgets."""
    found = [_point(figures, name, budget, "tokens", f"{budget:,}") for budget in figures.budgets]
    return [point for point in found if point is not None]


def _point(figures: Figures, name: str, budget: int, key: str, label: str) -> Point | None:
    losses = list(figures.losses(name, budget).values())
    if not losses:
        return None
    cells = (cell for cell in figures.cells if (cell["subject"], cell["budget"]) == (name, budget))
    value = next(cells)[key] / (MIB if key == "peak_bytes" else 1)
    return Point(float(value), statistics.mean(losses), standard_error(losses), label)


def _line(panel: Any, points: Sequence[Point], color: str, label: str) -> None:
    _draw(panel, points, color=color, marker="o", label=label)
    for point in points:
        panel.annotate(point.label, (point.x, point.loss), (3, 3), textcoords="offset points", fontsize="x-small")


def _marks(panel: Any, points: Sequence[Point], color: str, marker: str, label: str = "") -> None:
    _draw(panel, points, color=color, marker=marker, label=label, linestyle="none")


def _draw(panel: Any, points: Sequence[Point], **style: Any) -> None:
    values = [[getattr(point, key) for point in points] for key in ("x", "loss", "error")]
    panel.errorbar(*values, capsize=2, **style)
