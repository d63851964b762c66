"""Drawings as SVG text, the same bytes for the same figures, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

FONT = 'system-ui,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif'
# Class: color on a light page, on a dark one.
COLORS = {
    "card": ("#ffffff", "#161b22"),
    "edge": ("#d0d7de", "#3d444d"),
    "ink": ("#1f2933", "#e6edf3"),
    "muted": ("#52606d", "#9da7b3"),
    "blue": ("#2b6cb0", "#3b82d6"),
    "orange": ("#c77714", "#e3a04f"),
    "green": ("#22866a", "#4ac29a"),
    "purple": ("#a4478a", "#d681bd"),
    "gray": ("#7b8794", "#768390"),
}


@dataclass
class Drawing:
    """
    Args:
        title: for screen readers.
    """

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, *, color: str = "ink", size: int = 12, **style: str) -> None:
        """`anchor` is "start", "middle" or "end", `weight` a font's."""
        anchor, weight = style.get("anchor", "start"), style.get("weight", "400")
        place = f'x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
        self.parts.append(f'<text {place} class="{color}">{escape(words)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, color: str, *, radius: float = 3) -> None:
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        self.parts.append(f'<rect {place} rx="{radius}" class="{color}"/>')

    def outline(self, x: float, y: float, width: float, height: float) -> None:
        """Dashed."""
        place = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" height="{_number(height)}"'
        self.parts.append(f'<rect {place} rx="3" class="line gray" stroke-dasharray="4 3"/>')

    def line(self, points: Sequence[tuple[float, float]], color: str, *, width: float = 2) -> None:
        places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self.parts.append(f'<polyline points="{places}" class="line {color}" stroke-width="{width}"/>')

    def __str__(self) -> str:
        rules = [_rules(0), f"@media (prefers-color-scheme: dark){{{_rules(1)}}}"]
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
        head += f'width="{self.width}" height="{self.height}" role="img"><title>{escape(self.title)}</title>'
        style = f"<style>text{{font-family:{FONT}}}{''.join(rules)}</style>"
        card = f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="10" class="card"/>'
        return "\n".join([head, style, card, *self.parts, "</svg>"]) + "\n"


def _rules(dark: int) -> str:
    fills = "".join(f".{name}{{fill:{colors[dark]}}}" for name, colors in COLORS.items())
    strokes = "".join(f".line.{name}{{fill:none;stroke:{colors[dark]}}}" for name, colors in COLORS.items())
    return f"{fills}{strokes}.card{{stroke:{COLORS['edge'][dark]}}}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
