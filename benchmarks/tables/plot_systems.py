"""Everybody side by side, over numbers of ranks, and as layers and ranks grow, as plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tables.canvas import new_figure, save
from benchmarks.tables.markdown import MIB, Result, for_readers, per_repeat, quartiles
from benchmarks.tables.systems import KINDS, PARTS, part_seconds, place, rows

_MARKERS = "os^vDP*X"
_TIME_COLORS, _MEMORY_COLORS = ("C0", "C1", "C2", "C3", "C4"), ("C5", "C6", "C8", "C9")


@dataclass(frozen=True)
class Bar:
    """
    Args:
        parts: lengths by name, in the order in which they are stacked.
        mark: a length of its own.
    """

    name: str
    parts: dict[str, float]
    mark: float

    def segments(self) -> Iterator[tuple[str, float, float]]:
        """Of each part where it begins, and its length."""
        begin = 0.0
        for part, length in self.parts.items():
            yield part, begin, length
            begin += length


def time_bars(result: Result) -> list[Bar]:
    """Milliseconds of steps and of their parts, as if all were of the minutes of the first group: multiplied by what
    the first group's baseline took over what that of the own group did; the mark is the median ratio to the latter."""
    baseline, bars = result["baseline"], []
    plain = 1e3 * statistics.median(next(rows(result))[3][baseline]["seconds"])
    for _, name, figures, subjects in rows(result):
        own = subjects[baseline]["seconds"]
        scale = plain / (1e3 * statistics.median(own))
        parts = {part: 1e3 * scale * part_seconds(figures, part) for part in PARTS}
        bars.append(Bar(for_readers(name), parts, plain * statistics.median(per_repeat(figures["seconds"], own))))
    return bars


def memory_bars(result: Result) -> list[Bar]:
    """MiB of the rank with the most of each; the mark is the peak."""
    return [
        Bar(
            for_readers(name),
            {kind: _most(figures, kind) for kind in (*KINDS, "activations")},
            _most(figures, "peak"),
        )
        for _, name, figures, _ in rows(result)
    ]


def plot_side_by_side(result: Result, path: Path) -> None:
    """A bar for everybody: the parts of a step, and what is stored in it."""
    times, memory = time_bars(result), memory_bars(result)
    figure = new_figure(14, 1 + 0.22 * len(times))
    panels = figure.subplots(1, 2, sharey=True)
    baseline = f"{result['baseline']}'s"
    plain = next(bar.mark for bar in times if bar.name == result["baseline"])
    draw_bars(panels[0], times, mark="step", colors=_TIME_COLORS)
    panels[0].set_xlabel(
        f"ms: ratio to {baseline} step of the same minutes, times {baseline} {plain:.0f} ms of the first; "
        "parts where nothing overlaps"
    )
    draw_bars(panels[1], memory, mark="peak", colors=_MEMORY_COLORS)
    panels[1].set_xlabel("MiB, each of the rank with the most of it")
    for panel in panels:
        panel.legend(fontsize="small")
        panel.grid(axis="x", alpha=0.3)
        panel.margins(y=0.01)
    panels[0].invert_yaxis()
    save(figure, path)


def draw_bars(panel: Any, bars: list[Bar], *, mark: str, colors: Sequence[str]) -> None:
    """
    Args:
        mark: what the marks are.
        colors: of the parts, in their order.
    """
    names = [bar.name for bar in bars]
    for segments, color in zip(zip(*(bar.segments() for bar in bars), strict=True), colors, strict=True):
        lengths, begins = [length for _, _, length in segments], [begin for _, begin, _ in segments]
        panel.barh(names, lengths, left=begins, label=segments[0][0], color=color)
    panel.plot([bar.mark for bar in bars], names, "k|", label=mark)


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
        panel.set_title(f"{way} scaling, {place(results[0])}")
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
