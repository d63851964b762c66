"""The figure of the README, which tables.py writes: what SDP is, with its measured bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.svg import Drawing

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
    contestants = result["contestants"]
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
            ("a rank trains its column, a subnetwork;", "gradients: mean over 2 holders"),
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
        if title.startswith("SDP"):
            corners = [(left - 4, 50), (left + 54, 50), (left + 54, 242), (left - 4, 242), (left - 4, 50)]
            draw.line(corners, "ink", width=1.5)
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
