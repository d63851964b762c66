"""Markdown table of benchmarks/vision.py: an image classifier's memory, traffic and time beside DDP's and ZeRO-1's."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import MIB, Result, for_readers, per_repeat, table, with_spread
from benchmarks.tables.systems import KINDS, place, share_of_fewest

ZERO = "ZeRO-1"


def vision(result: Result) -> str:
    """Bytes of the rank with the most, FLOPs of the rank with the most as a share of the baseline's, ratios of the same
    repeat."""
    subjects, baseline, arguments = result["subjects"], result["baseline"], result["arguments"]
    whole = _most(subjects[baseline], "flops")
    rows = []
    for name, figures in subjects.items():
        ranks = figures["ranks"]
        state = max(sum(rank[kind] for kind in KINDS) for rank in ranks)
        sizes = [
            *(_most(figures, kind) for kind in KINDS),
            state,
            _most(figures, "activations"),
            _most(figures, "peak"),
        ]
        cells = [for_readers(name), *(f"{size / MIB:.1f}" for size in sizes)]
        cells += [f"{_most(figures, 'sent') / 1e6:.2f}", share_of_fewest(ranks)]
        cells += [f"{_most(figures, 'flops') / whole:.2f}", f"{1e3 * statistics.median(figures['seconds']):.0f}"]
        for other in (baseline, ZERO):
            ratios = per_repeat(figures["seconds"], subjects[other]["seconds"])
            cells.append("1" if name == other else with_spread(ratios))
        rows.append(cells)
    heads = ("", *KINDS, "state", "activations", "peak", "MB sent", "of the fewest", "FLOPs", "step, ms")
    size, side = result["model"]["num_parameters"] / 1e6, arguments["size"]
    facts = (
        f"{result['model']['name']}, {size:.1f}M parameters in fp32, {result['ranks']} ranks on {place(result)}, "
        f"{arguments['micro_batch']} random images of {side} x {side} per rank, "
        f"buckets of {arguments['bucket'] / 1e6:g}M elements; {arguments['repeats']} repeats; "
        f"the machine's load when the run began: {result['load']:.1f}; MiB, and all else, of the rank with the most:"
    )
    return f"{facts}\n\n" + table([*heads, f"of {baseline}'s", f"of {ZERO}'s"], rows)


def _most(figures: Result, what: str) -> float:
    return float(max(rank[what] for rank in figures["ranks"]))
