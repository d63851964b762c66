"""The cosine similarity with the dense gradient, as a plot."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.tables.canvas import new_figure, save
from benchmarks.tables.similarity import by_layer

# Regimes by color, strategies by line: they can be told apart in print as well.
_COLORS = {"forward": "tab:red", "backward": "tab:blue"}
_LINES = {"block": "-", "neuron": "--"}


def short_names(layers: list[str]) -> list[str]:
    """The last part of each name: a layer's index, "embed_tokens", "lm_head"; where several layers have one index, that
    of the stage before it."""
    last = [layer.rpartition(".")[2] for layer in layers]
    return [name if last.count(name) == 1 else _indices(layer) for layer, name in zip(layers, last, strict=True)]


def _indices(layer: str) -> str:
    numbers = [part for part in layer.split(".") if part.isdigit()]
    return ".".join(numbers) if len(numbers) > 1 else layer


def plot_similarity(result: dict[str, Any], path: Path) -> None:
    """One panel for each pre-training step; a line for each mode (median of the draws), a band from least to most.

    Raises:
        ValueError: matplotlib is not installed, or `path` has an ending that it cannot write.
    """
    steps = sorted({record["step"] for record in result["records"]})
    figure = new_figure(5.5 * len(steps), 4.5)
    panels = figure.subplots(1, len(steps), sharey=True, squeeze=False)[0]
    for panel, step in zip(panels, steps, strict=True):
        _draw(panel, result, step)
        panel.yaxis.set_major_formatter("{x:.2f}")
    panels[0].set_ylabel("cosine with the dense gradient")
    panels[0].legend()
    arguments = result["arguments"]
    size = result["model"]["num_parameters"] / 1e6
    figure.suptitle(f"{size:.1f}M parameters, {arguments['ranks']} workers, coverage {arguments['coverage']:g}")
    save(figure, path)


def _draw(panel: Any, result: dict[str, Any], step: int) -> None:
    for mode in result["plans"]:
        regime, _, strategy = mode.partition(" x ")
        values = by_layer(result, step, mode)
        style = {"color": _COLORS[regime], "linestyle": _LINES[strategy], "marker": "."}
        panel.plot(range(len(values)), [statistics.median(draws) for draws in values.values()], label=mode, **style)
        low, high = ([pick(draws) for draws in values.values()] for pick in (min, max))
        panel.fill_between(range(len(values)), low, high, color=_COLORS[regime], alpha=0.15, linewidth=0)
        panel.set_xticks(range(len(values)), short_names(list(values)), rotation=45, ha="right")
    panel.set_title(f"after {step} dense steps")
    panel.set_xlabel("layer")
    panel.grid(alpha=0.3)
