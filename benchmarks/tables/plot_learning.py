"""The learning study as plots: losses at equal operations over the size, the tokens and the memory of a worker."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.tables.canvas import new_figure, save, spectrum
from benchmarks.tables.learning import FEW_DATA, Figures, standard_error
from benchmarks.tables.markdown import MIB, Result

_MARKERS = {
    "dense tail": "*",
    "growing": "^",
    "whole ends": "H",
    "static, forward": "P",
    "static, backward": "X",
    "static, scaled": "s",
    "static but drawn again": "D",
    "regularized": "x",
    "fewer tokens in a step": "1",
}
_OF_LINES = "ov^P*Xs<>dph12348"
_LABELS = {"parameters": "parameters", "peak_bytes": "peak memory of a worker, MiB"}


@dataclass(frozen=True)
class Point:
    """
    Args:
        x: on the axis.
        loss: mean over seeds.
        error: of the mean; 0 with one seed.
    """

    x: float
    loss: float
    error: float


def plot_learning(result: Result, path: Path, study: str = "text") -> None:
    """A column for each budget: losses over the size and over the memory, with a line through all sizes of data
    parallelism. Below, losses over the tokens, with a line through all budgets of a size. A color is a size everywhere,
    a marker what kind a subject is of.

    Raises:
        ValueError: matplotlib is not installed, or `path` has an ending that it cannot write.
    """
    figures = Figures.of(result, study)
    dense, others = figures.subjects(dense=True), figures.subjects(dense=False)
    styles = _styles(figures, dense, others)
    figure = new_figure(5 * len(figures.budgets), 15)
    rows = figure.subplots(3, len(figures.budgets), squeeze=False)
    for column, budget in enumerate(figures.budgets):
        for row, key in zip(rows, ("parameters", "peak_bytes"), strict=False):
            line = at_budget(figures, dense, budget, key)
            row[column].plot([point.x for point in line], [point.loss for point in line], color="gray", zorder=0)
            for name in (*dense, *others):
                _draw(row[column], at_budget(figures, [name], budget, key), **styles[name])
            _dress(row[column], _LABELS[key], f"{budget:,} dense steps")
    for panel in rows[2]:
        panel.remove()
    below = figure.add_subplot(rows[2][0].get_gridspec()[2, :])
    for name in dense:
        _draw(below, over_tokens(figures, name), **{**styles[name], "linestyle": "-"})
    for name in others:
        _draw(below, over_tokens(figures, name), **styles[name])
    _dress(below, "tokens", "all budgets")
    for name in dense:
        below.plot([], [], label=f"data parallelism, {name.removeprefix('dense ')}", **styles[name])
    for kind in dict.fromkeys(kind_of(figures.some(name)["described"]) for name in others):
        below.plot([], [], label=kind, color="black", marker=_MARKERS[kind], linestyle="none")
    figure.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    save(figure, path)


def kind_of(described: Mapping[str, Any]) -> str:
    """What a subject is an example of, of which the table has the names."""
    if "rows" in described:
        return "fewer tokens in a step"
    block = described.get("block")
    if block is None:
        return "regularized"
    if "whole_ends" in str(block):
        return "whole ends"
    if "schedule" in block:
        return "dense tail" if len(block["schedule"]) == 2 else "growing"
    if "redraw_interval" in block:
        return "static but drawn again"
    if "dense_branch_scale" in block:
        return "static, scaled"
    return f"static, {block.get('regime', 'forward')}"


def _styles(figures: Figures, dense: Sequence[str], others: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of data parallelism a color for each size; of all others the color of their size and a marker for their kind."""
    colors = dict(zip(dense, spectrum(len(dense)), strict=True))
    styles: dict[str, dict[str, Any]] = {name: {"color": colors[name], "marker": "o"} for name in dense}
    for name in others:
        kind = kind_of(figures.some(name)["described"])
        styles[name] = {"color": colors.get(figures.of_its_size(name) or "", "black"), "marker": _MARKERS[kind]}
    return {name: {**style, "linestyle": "none"} for name, style in styles.items()}


def _dress(panel: Any, label: str, title: str) -> None:
    panel.set_xscale("log")
    panel.set_xlabel(label)
    panel.set_ylabel("dense validation loss, nats per byte")
    panel.set_title(title)
    panel.tick_params(axis="x", which="minor", labelsize="x-small", rotation=45)
    panel.grid(alpha=0.3, which="both")


def plot_few_data(result: Result, path: Path) -> None:
    """A panel for each size of the text: losses at the end of runs over their length; a line for everybody."""
    there = [study for study in FEW_DATA if Figures.of(result, study).cells]
    if not there:
        raise ValueError("the study has no cells with little text")
    figure = new_figure(9 * len(there), 6)
    for panel, study in zip(figure.subplots(1, len(there), squeeze=False)[0], there, strict=True):
        figures = Figures.of(result, study)
        names = [*figures.subjects(dense=True), *figures.subjects(dense=False)]
        for name, marker in zip(names, cycle(_OF_LINES), strict=False):
            _draw(panel, over_lengths(figures, name), marker=marker, label=name)
        size = figures.cells[0]["train_bytes"] // 1000
        _dress(panel, "length of the run, in operations of so many dense steps", f"{size} kB of text")
        panel.legend(fontsize="x-small")
    save(figure, path)


def at_budget(figures: Figures, names: Sequence[str], budget: int, key: str) -> list[Point]:
    """Of those that have this budget, by what is on the axis."""
    found = [_point(figures, name, budget, key) for name in names]
    return sorted((point for point in found if point is not None), key=lambda point: point.x)


def over_tokens(figures: Figures, name: str) -> list[Point]:
    """Of one subject at all budgets."""
    found = [_point(figures, name, budget, "tokens") for budget in figures.budgets]
    return [point for point in found if point is not None]


def over_lengths(figures: Figures, name: str) -> list[Point]:
    """Of one subject at all budgets, by these."""
    found = [_point(figures, name, budget, "budget") for budget in figures.budgets]
    return [point for point in found if point is not None]


def _point(figures: Figures, name: str, budget: int, key: str) -> Point | None:
    losses = list(figures.losses(name, budget).values())
    if not losses:
        return None
    cells = (cell for cell in figures.cells if (cell["subject"], cell["budget"]) == (name, budget))
    value = next(cells)[key] / (MIB if key == "peak_bytes" else 1)
    return Point(float(value), statistics.mean(losses), standard_error(losses))


def _draw(panel: Any, points: Sequence[Point], **style: Any) -> None:
    values = [[getattr(point, key) for point in points] for key in ("x", "loss", "error")]
    panel.errorbar(*values, capsize=2, **style)
