"""Figures of Matplotlib, which is an extra. Needs `pip install "sdp_deepspeed[plot]"`."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def new_figure(width: float, height: float) -> Any:
    """In inches.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('a plot needs matplotlib: pip install "sdp_deepspeed[plot]"') from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """
    Raises:
        ValueError: `path` has an ending that matplotlib cannot write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
