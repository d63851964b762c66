"""Reports of runs that nobody ran."""

from __future__ import annotations

from typing import Any

from sdp_deepspeed.training.report_table import REPORT_VERSION

MIB = 2**20


def report(label: str, *, scale: int, **changes: Any) -> dict[str, Any]:
    """A report whose second rank is the larger one: `scale` MiB of each kind there."""
    kinds = ("weights", "gradients", "optimizer", "peak", "sent")
    return {
        "version": REPORT_VERSION,
        "label": label,
        "num_ranks": 2,
        "steps": 10,
        "dense_validation_loss": 1.25,
        "step_seconds": {"median": 0.1 * scale, "p10": 0.05, "p90": 0.5, "num_steps": 8},
        "ranks": [dict.fromkeys(kinds, MIB // 2), dict.fromkeys(kinds, scale * MIB)],
        "hardware": "a CPU",
    } | changes
