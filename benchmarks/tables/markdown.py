"""Pieces of Markdown tables: rows, numbers with their spread, names for readers."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

Result = dict[str, Any]  # one JSON file under benchmarks/results
MIB = 2**20


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def with_spread(values: Sequence[float]) -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = quartiles(values)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def span(values: Sequence[float]) -> str:
    """Lowest and highest; one number where both look the same."""
    return " to ".join(dict.fromkeys(f"{value:.2f}" for value in (min(values), max(values))))


def per_repeat(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Ratios to the baseline of the same repeat."""
    return [value / base for value, base in zip(values, baseline, strict=True)]


def for_readers(name: str) -> str:
    """A contestant's name in a result, as a table shows it."""
    name = re.sub(r"^zero(\d)", r"ZeRO-\1", name)
    name = re.sub(r"^sdp\b", "forward x block", name)  # in results of before modes were named
    return re.sub(r",? C=([\d./]+)", lambda match: f", {coverage(float(Fraction(match[1])))}", name)


def coverage(value: float) -> str:
    """As a fraction, such as C = 1/2."""
    return f"C = {Fraction(value).limit_denominator(1024)}"
