"""Markdown table of re-plans: beside the steps before them, and the bytes that they moved."""

from __future__ import annotations

import statistics

from benchmarks.tables.markdown import Result, coverage, per_repeat, table, with_spread


def replan_time(result: Result) -> str:
    """Medians (quartiles); steps are ratios to the median step before the re-plan of the same repeat."""
    rows = []
    for row in result["results"]:
        replans = row["replans"]
        seconds = [replan["seconds"] for replan in replans]
        parts = {part: statistics.median(replan["parts"][part] for replan in replans) for part in replans[0]["parts"]}
        sent, least, asked = (replans[0][f"{kind}_bytes"] for kind in ("sent", "least", "asked"))
        cells = [f"{coverage(row['from'])} to {coverage(row['to']).removeprefix('C = ')}", str(row["stage"])]
        cells += [with_spread(seconds), with_spread(per_repeat(seconds, row["steps"]))]
        cells += [f"{1e3 * part:.0f}" for part in parts.values()]
        cells += [f"{sent / 1e6:.1f}", f"{sent / least:.2f}", f"{asked / 1e3:.0f}"]
        rows.append(cells)
    model = f"{result['model']['num_parameters'] / 1e6:.1f}M parameters in {result['arguments']['precision']}"
    mode = " x ".join(result["arguments"]["mode"])
    caption = (
        f"{result['ranks']} ranks, {model}, {mode}, batch 1 x {result['sequence_length']} per rank; "
        f"{len(result['results'][0]['replans'])} repeats; at most {result['limit']} steps were asked for:"
    )
    names = [f"{part}, ms" for part in result["results"][0]["replans"][0]["parts"]]
    heads = ("", "stage", "seconds", "steps", *names, "MB moved", "of the least", "kB to ask for them")
    return f"{caption}\n\n" + table(heads, rows)
