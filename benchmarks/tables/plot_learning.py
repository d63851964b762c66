"""The learning study as plots: losses at equal operations over the size, the tokens and the memory of a worker."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.tables.learning import Figures
from benchmarks.tables.markdown import MIB, Result

_AXES = {"parameters": "parameters", "tokens": "tokens", "state_bytes": "model state of a worker, MiB"}


def plot_learning(result: Result, path: Path, study: str = "text") -> None:
    """One panel for each axis; for each budget a line through all sizes of data parallelism, and points for the others.

    Raises:
        ValueError: matplotlib is not installed, or `path` has an ending that it cannot write.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('a plot needs matplotlib: pip install "sdp_deepspeed[plot]"') from None
    figures = Figures.of(result, study)
    figure = Figure(figsize=(15, 5), layout="constrained")
    panels = figure.subplots(1, len(_AXES), sharey=True)
    for panel, (key, label) in zip(panels, _AXES.items(), strict=True):
        for index, budget in enumerate(figures.budgets):
            _draw(panel, figures, budget, key, f"C{index}")
        panel.set_xscale("log")
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("dense validation loss, nats per byte")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def points(figures: Figures, budget: int, key: str, *, dense: bool) -> list[tuple[float, float, str]]:
    """What is on the axis, the mean loss, and the name; by the axis."""
    found = []
    for name in figures.subjects(dense=dense):
        losses = figures.losses(name, budget)
        if losses:
            cells = (cell for cell in figures.cells if (cell["subject"], cell["budget"]) == (name, budget))
            value = next(cells)[key] / (MIB if key == "state_bytes" else 1)
            found.append((float(value), statistics.mean(losses.values()), name))
    return sorted(found)


def _draw(panel: Any, figures: Figures, budget: int, key: str, color: str) -> None:
    line = points(figures, budget, key, dense=True)
    label = f"data parallelism, {budget:,} dense steps"
    panel.plot([x for x, _, _ in line], [y for _, y, _ in line], color=color, marker="o", label=label)
    others = points(figures, budget, key, dense=False)
    panel.scatter([x for x, _, _ in others], [y for _, y, _ in others], color=color, marker="x", label="others")
