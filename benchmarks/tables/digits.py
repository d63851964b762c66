"""Markdown table of runs on digits: subnetworks beside data parallelism at equal FLOPs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.tables.markdown import Result, table


def digits(result: Result) -> str:
    """Means and standard deviations over seeds, and the worst seed; FLOPs as a share of data parallelism's."""
    runs = result["runs"]
    subjects = list(dict.fromkeys(run["subject"] for run in runs))
    plain = statistics.mean(run["flops"] for run in runs if run["subject"] == subjects[0])
    rows = []
    for subject in subjects:
        own = [run for run in runs if run["subject"] == subject]
        top1 = [100 * run["dense_top1"] for run in own]
        losses = [run["dense_validation_loss"] for run in own]
        cells = [
            subject,
            str(len(own)),
            f"{_mean_and_spread(top1, 2)} (worst {min(top1):.2f})",
            _mean_and_spread(losses, 3),
        ]
        cells += [str(round(statistics.mean(run["steps"] for run in own)))]
        cells += [f"{statistics.mean(run['flops'] for run in own) / plain:.3f}"]
        cells += [f"{statistics.mean(run['seconds'] for run in own):.0f}"]
        rows.append(cells)
    caption = (
        f"{result['ranks']} CPU ranks, batches of 64; {result['epochs']:g} epochs of 1437 images for data parallelism; "
        f"360 test images, so one is 0.28%:"
    )
    heads = ("", "seeds", "dense top-1, %", "dense loss", "steps", "FLOPs", "seconds, start and export included")
    return f"{caption}\n\n" + table(heads, rows)


def _mean_and_spread(values: Sequence[float], digits_shown: int) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits_shown}f} ± {spread:.{digits_shown}f}"
