"""Figures of Matplotlib, which is an extra. Needs `pip install "sdp_deepspeed[plot]"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MISSING = 'a plot needs matplotlib: pip install "sdp_deepspeed[plot]"'


def new_figure(width: float, height: float) -> Any:
    """In inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(_MISSING) from None
    return Figure(figsize=(width, height), layout="constrained")


def spectrum(number: int) -> list[Any]:
    """So many colors, in an order that one sees.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
    except ImportError:
        raise ValueError(_MISSING) from None
    return [colormaps["turbo"](0.08 + 0.84 * index / max(1, number - 1)) for index in range(number)]


def save(figure: Any, path: Path) -> None:
    """
    Raises:
        ValueError: `path` has an ending that matplotlib cannot write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
