"""Everybody side by side, over numbers of ranks, and as layers and ranks grow, as plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables.canvas import new_figure, save
from benchmarks.tables.markdown import MIB, Result, for_readers, quartiles
from benchmarks.tables.systems import KINDS, PARTS, part_seconds, rows

_MARKERS = "os^vDP*X"


def plot_side_by_side(result: Result, path: Path) -> None:
    """A bar for everybody: the parts of a step, and what is stored in it."""
    found = [(for_readers(name), figures) for _, name, figures, _ in rows(result)]
    figure = new_figure(14, 1 + 0.22 * len(found))
    times, memory = figure.subplots(1, 2, sharey=True)
    names = [name for name, _ in found]
    _bars(times, names, {part: [1e3 * part_seconds(figures, part) for _, figures in found] for part in PARTS})
    step = [1e3 * statistics.median(figures["seconds"]) for _, figures in found]
    times.plot(step, names, "k|", label="step")
    times.set_xlabel("ms of a step; its parts where nothing overlaps")
    most = {kind: [_most(figures, kind) for _, figures in found] for kind in (*KINDS, "activations")}
    _bars(memory, names, most)
    memory.plot([_most(figures, "peak") for _, figures in found], names, "k|", label="peak")
    memory.set_xlabel("MiB, each of the rank with the most of it")
    for panel in (times, memory):
        panel.legend(fontsize="small")
        panel.grid(axis="x", alpha=0.3)
        panel.margins(y=0.01)
    times.invert_yaxis()
    save(figure, path)


def _bars(panel: Any, names: list[str], parts: dict[str, list[float]]) -> None:
    ends = [0.0] * len(names)
    for part, values in parts.items():
        panel.barh(names, values, left=ends, label=part)
        ends = [end + value for end, value in zip(ends, values, strict=True)]


def _most(figures: dict[str, Any], what: str) -> float:
    return max(float(rank[what]) for rank in figures["ranks"]) / MIB


def plot_scaling(*results: Result, path: Path) -> None:
    """A panel for each way to scale, a line for everybody; quartiles of the repeats."""
    ways = list(results[0]["ways"])
    figure = new_figure(6 * len(ways), 5)
    for panel, way in zip(figure.subplots(1, len(ways), squeeze=False)[0], ways, strict=True):
        lines: dict[str, dict[int, list[float]]] = {}
        for result in results:
            for name, figures in result["ways"][way]["subjects"].items():
                lines.setdefault(for_readers(name), {})[result["ranks"]] = figures["seconds"]
        _lines(panel, lines)
        panel.set_title(f"{way} scaling, two cores")
        panel.set_xlabel("ranks")
        panel.set_ylabel("ms of a step")
    save(figure, path)


def plot_growth(*results: Result, path: Path) -> None:
    """A panel for each number of layers, a line for everybody; quartiles of the repeats."""
    depths = sorted({row["num_layers"] for result in results for row in result["results"]})
    figure = new_figure(6 * len(depths), 5)
    for panel, depth in zip(figure.subplots(1, len(depths), squeeze=False)[0], depths, strict=True):
        lines: dict[str, dict[int, list[float]]] = {}
        for ranks, row in _of_depth(results, depth):
            subnetworks = f", k = {row['num_subnetworks']}" if row["num_subnetworks"] else ""
            lines.setdefault(for_readers(row["name"]) + subnetworks, {})[ranks] = row["seconds"]
        _lines(panel, lines)
        panel.set_title(f"{depth} layers")
        panel.set_xlabel("ranks")
        panel.set_ylabel("host ms of a rank's step")
    save(figure, path)


def _of_depth(results: tuple[Result, ...], depth: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for result in results:
        yield from ((result["ranks"], row) for row in result["results"] if row["num_layers"] == depth)


def _lines(panel: Any, lines: dict[str, dict[int, list[float]]]) -> None:
    ticks = sorted({ranks for line in lines.values() for ranks in line})
    for index, (name, line) in enumerate(lines.items()):
        spread = [[1e3 * second for second in quartiles(seconds)] for seconds in line.values()]
        errors = [[middle - low for low, middle, _ in spread], [high - middle for _, middle, high in spread]]
        style = {"marker": _MARKERS[index % len(_MARKERS)], "capsize": 2, "label": name}
        panel.errorbar(list(line), [middle for _, middle, _ in spread], errors, **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize="x-small")
