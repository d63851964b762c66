"""Markdown table of how fast text is tokenized."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Result, span, table


def tokenize_speed(result: Result) -> str:
    """Medians over repeats, with the lowest and the highest."""
    rows = []
    for name, runs in result["runs"].items():
        cells = [name]
        for by in ("seconds", "cpu_seconds"):
            rates = [run["tokens"] / run[by] / 1e6 for run in runs]
            cells += [f"{statistics.median(rates):.2f}", span(rates)]
        rows.append(cells)
    load = result["load"]
    facts = [
        f"{result['text_bytes'] / 1e6:.1f} MB of text",
        f"{len(runs)} repeats",
        f"load of the machine {load['before'][0]:.1f} before and {load['after'][0]:.1f} after, on "
        f"{result['provenance']['cores']} cores",
    ]
    heads = ("", "million tokens/s", "lowest to highest", "per CPU second", "lowest to highest")
    return f"{', '.join(facts)}\n\n" + table(heads, rows)
