"""The figures of docs/: what SDP is with its measured bars, and three plots. tables.py writes them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.quality import Figures
from benchmarks.svg import Axes, Drawing, ticks

MIB = 2**20
SDP = "forward x block + ZeRO-1 C=0.5"


def ratio_of_steps(contestants: Mapping[str, Any], name: str, baseline: str) -> list[float]:
    """Per repeat."""
    seconds, base = (contestants[each]["seconds"] for each in (name, baseline))
    return [value / other for value, other in zip(seconds, base, strict=True)]


def most(contestants: Mapping[str, Any], name: str, kind: str) -> float:
    """Of the rank with the most."""
    return max(float(rank[kind]) for rank in contestants[name]["ranks"])


def overview(result: Mapping[str, Any]) -> str:
    """Data parallelism, ZeRO-1 and SDP side by side, over bars measured by compare.py."""
    contestants = result["groups"]["main"]["contestants"]
    draw = Drawing(940, 452, "Data parallelism, ZeRO-1 and subnetwork data parallelism (SDP) side by side")
    units = ("attention 0", "MLP 0", "attention 1", "MLP 1", "embeddings")
    everyone = (0, 1, 2, 3)
    panels: list[tuple[str, str, list[tuple[int, ...]], int, tuple[str, str]]] = [
        (
            "Data parallelism",
            "DDP",
            [everyone] * 5,
            1,
            ("every rank trains everything;", "gradients: mean over 4 ranks"),
        ),
        ("ZeRO-1", "ZeRO-1", [everyone] * 5, 4, ("the same work; only the", "optimizer state is sharded")),
        (
            "SDP, C = 1/2, with ZeRO-1",
            SDP,
            [(0, 2), (1, 3), (0, 1), (2, 3), everyone],
            0,
            ("every rank trains its units;", "gradients: mean over 2 holders"),
        ),
    ]
    for row, unit in enumerate(units):
        draw.text(112, 92 + 34 * row, unit, color="muted", anchor="end")
    for column, (title, name, holders, shards, words) in enumerate(panels):
        left = 126 + 272 * column
        draw.text(left + 109, 34, title, size=16, weight="600", anchor="middle")
        for rank in everyone:
            x = left + 56 * rank
            draw.text(x + 25, 62, f"rank {rank}", color="muted", anchor="middle")
            for row, holding in enumerate(holders):
                y = 74 + 34 * row
                if rank not in holding:
                    draw.outline(x, y, 50, 28)
                    continue
                draw.rect(x, y, 50, 28, "blue" if row < 4 else "gray")
                draw.rect(x + 4, y + 19, 42 / (shards or len(holding)), 5, "orange", radius=1)
        for line, text in enumerate(words):
            draw.text(left + 109, 264 + 18 * line, text, color="muted", anchor="middle")
        bars = [
            ("blue", most(contestants, name, "peak") / most(contestants, "DDP", "peak")),
            ("green", statistics.median(ratio_of_steps(contestants, name, "DDP"))),
            ("purple", most(contestants, name, "sent") / most(contestants, "DDP", "sent")),
        ]
        for row, (color, value) in enumerate(bars):
            draw.rect(left, 308 + 24 * row, max(2, 110 * value), 15, color)
            draw.text(left + 110 * value + 6, 320 + 24 * row, f"{value:.2f}x")
    for row, label in enumerate(("peak memory", "step time", "bytes sent")):
        draw.text(112, 320 + 24 * row, label, color="muted", anchor="end")
    draw.rect(126, 389, 14, 12, "blue")
    draw.text(146, 399, "unit's weights", color="muted")
    draw.rect(248, 389, 14, 12, "gray")
    draw.text(268, 399, "shared weights", color="muted")
    draw.rect(378, 392, 14, 5, "orange", radius=1)
    draw.text(398, 399, "optimizer state", color="muted")
    draw.outline(508, 389, 14, 12)
    draw.text(528, 399, "neither stored nor run", color="muted")
    size = result["model"]["num_parameters"] / 1e6
    source = f"Bars: measured on {result['ranks']} {result['device']} ranks, {size:.1f}M parameters, "
    source += f"{result['arguments']['precision']}, relative to data parallelism (docs/results.md). "
    draw.text(470, 432, source + "The exported model is dense.", color="muted", size=11, anchor="middle")
    return str(draw)


def memory_and_bytes(result: Mapping[str, Any], label: Any) -> str:
    """Bars of peak memory and bytes sent for each contestant, relative to data parallelism.

    Args:
        label: of a contestant's name.
    """
    contestants = result["groups"]["main"]["contestants"]
    rows = len(contestants)
    draw = Drawing(880, 84 + 24 * rows, "Peak memory and bytes sent of each contestant")
    for left, title, unit in ((290, "peak memory", "MiB"), (600, "bytes sent per step", "MB")):
        draw.text(left, 34, f"{title} ({unit})", weight="600", size=13)
    for row, name in enumerate(contestants):
        y, is_sdp = 50 + 24 * row, " x " in name
        draw.text(276, y + 12, label(name), anchor="end", weight="600" if is_sdp else "400")
        for left, kind, scale, color in ((290, "peak", MIB, "blue"), (600, "sent", 1e6, "purple")):
            largest = max(most(contestants, other, kind) for other in contestants)
            value = most(contestants, name, kind)
            width = 200 * value / largest
            draw.rect(left, y, max(1, width), 16, color if is_sdp else "gray")
            draw.text(left + width + 6, y + 12, f"{value / scale:.1f}", color="muted")
    draw.text(
        430, 72 + 24 * rows, f"{result['ranks']} ranks, of the rank with the most", color="muted", anchor="middle"
    )
    return str(draw)


def quality(figures: Figures, rows: Sequence[tuple[str, str, str]]) -> str:
    """Final dense losses over the length of the run.

    Args:
        rows: subject, label, color.
    """
    lines: list[tuple[str, str, list[tuple[float, float, float]]]] = []
    for subject, label, color in rows:
        points = []
        for budget in figures.budgets:
            losses = list(figures.losses(subject, budget).values())
            if losses and budget >= 250:
                points.append((float(budget), statistics.mean(losses), figures.error(losses)))
        if points:
            lines.append((label, color, points))
    every = [point for _, _, points in lines for point in points]
    budgets = sorted({x for x, _, _ in every})
    low, high = min(y - error for _, y, error in every), max(y + error for _, y, error in every)
    draw = Drawing(860, 400, "Validation loss of the dense model over the length of the run, at equal FLOPs")
    panel = (budgets[0] / 1.1, budgets[-1] * 1.1), (low - 0.03, high + 0.03)
    axes = Axes(draw, 70, 50, 470, 280, *panel, log_x=True)
    words = "FLOPs, as steps of data parallelism with 0.41M parameters"
    axes.frame(budgets, ticks(*panel[1]), words, "validation loss of the dense model, nats per byte")
    for row, (label, color, points) in enumerate(lines):
        dashes = "5 4" if label.startswith("data parallelism") else ""
        axes.curve([(x, y) for x, y, _ in points], color, dashes=dashes)
        for x, y, error in points:
            draw.line([axes.at(x, y - error), axes.at(x, y + error)], color, width=1.5)
        y = 70 + 26 * row
        draw.line([(564, y - 4), (592, y - 4)], color, dashes=dashes)
        draw.dot(578, y - 4, color)
        draw.text(600, y, label)
    return str(draw)


def quickstart(result: Mapping[str, Any]) -> str:
    """Loss and memory of the quickstart's two runs over the operations of a worker."""
    draw = Drawing(860, 470, "Loss and peak memory of the quickstart run over its FLOPs")
    styles = [("SDP: half of the blocks", "blue", ""), ("plain ZeRO-1", "gray", "5 4")]
    curves, memory = [], []
    for run in result["runs"].values():
        per_step = [phase["flops"] for phase in run["phases"] for _ in range(phase["steps"])]
        spent = [0.0]
        for flops in per_step:
            spent.append(spent[-1] + flops / 1e12)
        keys = ("loss", "subnetwork_loss")
        losses = [(spent[log["step"]], log[key]) for log in run["history"] for key in keys if key in log]
        dense = [(spent[log["step"]], log["eval_loss"]) for log in run["history"] if "eval_loss" in log]
        curves.append((losses, dense))
        steps, first = [], 0
        for phase in run["phases"]:
            last = first + phase["steps"]
            steps += [(spent[first], phase["peak"] / MIB), (spent[last], phase["peak"] / MIB)]
            first = last
        memory.append(steps)
    right = max(points[-1][0] for points in memory)
    heights = [y for both in curves for points in both for _, y in points]
    upper = Axes(draw, 70, 50, 500, 190, (0, right), (min(heights) - 0.2, max(heights) + 0.2))
    upper.frame([], ticks(*upper.y), "", "loss, nats per token")
    highest = max(y for points in memory for _, y in points)
    lower = Axes(draw, 70, 290, 500, 120, (0, right), (0, highest * 1.15))
    lower.frame(ticks(0, right), ticks(0, highest * 1.15, 3), "TFLOPs of a worker", "peak memory of a worker, MiB")
    for row, ((label, color, dashes), (training, dense), steps) in enumerate(zip(styles, curves, memory, strict=True)):
        upper.curve(training, color, dots=False, dashes=dashes)
        for point in dense:
            draw.dot(*upper.at(*point), color, radius=5)
        lower.curve(steps, color, dots=False, dashes=dashes)
        y = 76 + 26 * row
        draw.line([(590, y - 4), (618, y - 4)], color, dashes=dashes)
        draw.text(626, y, label)
    draw.text(590, 134, "lines: training loss (SDP: of a subnetwork);", color="muted")
    draw.text(590, 150, "dots: validation loss of the dense model", color="muted")
    return str(draw)
