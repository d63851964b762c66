"""Plots of runs side by side. Needs matplotlib: `pip install "sdp_deepspeed[plot]"`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sdp_deepspeed.training.curves import Curve

# Axis title, and what of a curve lies on it; None leaves the run out of this panel.
_PANELS: tuple[tuple[str, Callable[[Curve], Sequence[float] | None]], ...] = (
    ("{items}", lambda curve: curve.amounts),
    ("FLOPs of all ranks", lambda curve: curve.flops),
    ("hours of training", lambda curve: [seconds / 3600 for seconds in curve.seconds]),
)


def plot_losses(curves: Sequence[Curve], path: Path) -> None:
    """Write the dense validation loss over tokens, FLOPs and time, in the format of the path's ending.

    Raises:
        ValueError: matplotlib is not installed, `path` has an ending that it cannot write, or no run was evaluated.
    """
    figure = loss_figure(curves)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def loss_figure(curves: Sequence[Curve]) -> Any:
    """A panel for each axis; what a run has not measured is missing from that panel alone."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('--plot needs matplotlib: pip install "sdp_deepspeed[plot]"') from None
    if not any(curve.losses for curve in curves):
        raise ValueError("--plot: no run has an evaluation yet: nothing to draw")
    figure = Figure(figsize=(5 * len(_PANELS), 4.5), layout="constrained")
    items = " or ".join(sorted({curve.items for curve in curves}))
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (title, values_of) in zip(panels, _PANELS, strict=True):
        for index, curve in enumerate(curves):
            values = values_of(curve)
            if values is not None:
                panel.plot(values, curve.losses, marker=".", color=f"C{index}", label=curve.label)
        panel.set_xlabel(title.format(items=items))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("dense validation loss, nats" + (" per token" if items == "tokens" else ""))
    panels[0].legend()
    return figure
