"""Drawings as SVG text, the same bytes for the same figures, readable on light and dark pages."""

from __future__ import annotations

import math
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
    "grid": ("#e4e8ec", "#2d333b"),
    "blue": ("#2b6cb0", "#3b82d6"),
    "orange": ("#c77714", "#e3a04f"),
    "green": ("#22866a", "#4ac29a"),
    "purple": ("#a4478a", "#d681bd"),
    "gray": ("#7b8794", "#768390"),
    "red": ("#c0392b", "#ff7b72"),
    "brown": ("#7a5c3e", "#c9a57f"),
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

    def line(self, points: Sequence[tuple[float, float]], color: str, *, width: float = 2, dashes: str = "") -> None:
        places = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<polyline points="{places}" class="line {color}" stroke-width="{width}"{dashed}/>')

    def dot(self, x: float, y: float, color: str, radius: float = 3.5) -> None:
        self.parts.append(f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{radius}" class="{color}"/>')

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


@dataclass(frozen=True)
class Axes:
    """A panel of a drawing.

    Args:
        left, top, width, height: of the panel, in the drawing.
        x, y: lowest and highest values.
        log_x: whether x is logarithmic.
    """

    drawing: Drawing
    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        low, high = self.x
        share = math.log(x / low) / math.log(high / low) if self.log_x else (x - low) / (high - low)
        return self.left + share * self.width, self.top + self.height * (self.y[1] - y) / (self.y[1] - self.y[0])

    def frame(self, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str, y_label: str) -> None:
        """Grid, ticks and labels."""
        draw = self.drawing
        for tick in y_ticks:
            y = self.at(self.x[0], tick)[1]
            draw.line([(self.left, y), (self.left + self.width, y)], "grid", width=1)
            draw.text(self.left - 8, y + 4, f"{tick:g}", color="muted", anchor="end")
        for tick in x_ticks:
            draw.text(
                self.at(tick, self.y[0])[0], self.top + self.height + 18, f"{tick:g}", color="muted", anchor="middle"
            )
        middle = self.left + self.width / 2
        draw.text(middle, self.top + self.height + 36, x_label, color="muted", anchor="middle")
        draw.text(self.left - 8, self.top - 10, y_label, color="muted")

    def curve(self, points: Sequence[tuple[float, float]], color: str, *, dots: bool = True, dashes: str = "") -> None:
        places = [self.at(*point) for point in points]
        self.drawing.line(places, color, dashes=dashes)
        for place in places if dots else ():
            self.drawing.dot(*place, color)


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Round values between two, about as many as asked for."""
    raw = (high - low) / number
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(step * index, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]
