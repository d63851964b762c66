"""Markdown tables from the raw JSON under benchmarks/results: `python benchmarks/table.py [file ...]`."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from tables.counts import collectives, faults, model_state, peak_memory, peak_shares, span, startup
from tables.plot import similarity_by_layer

OVERLAP = ", overlap"  # as in step_time.py
RESULTS = Path(__file__).parents[1] / "results"


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def step_time(result: dict[str, Any]) -> str:
    """Median and quartiles of step times, and of the ratios to the baseline of the same repeat; counts beside them."""
    baseline = result["seconds"][result["baseline"]]
    lines = [
        f"{_run(result)}, {len(baseline)} repeats; counts are those of the rank that has most",
        "",
        "| | step (ms) | quartiles | ratio to baseline | quartiles | target | GFLOPs | ratio | MB sent | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, seconds in result["seconds"].items():
        low, middle, high = quartiles([1e3 * value for value in seconds])
        ratio_low, ratio, ratio_high = quartiles([a / b for a, b in zip(seconds, baseline, strict=True)])
        lines.append(
            f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {ratio:.3f} | {ratio_low:.3f} to {ratio_high:.3f} |"
            + _work_cells(result, name)
        )
    return "\n".join(lines)


def _run(result: dict[str, Any]) -> str:
    arguments = result["arguments"]
    more = f", {arguments['accumulation']} micro-steps" if arguments["accumulation"] > 1 else ""
    link = f", {result['link']} between them" if result.get("link") else ""
    return (
        f"{result['ranks']} ranks{link}, {result['model']['num_parameters'] / 1e6:.1f}M parameters, batch "
        f"{arguments['micro_batch']} x {result['sequence_length']} per rank{more}"
    )


def overlap(results: list[dict[str, Any]]) -> str:
    """Step time with overlap_comm as a share of that without, in the same repeat: median (quartiles)."""
    names = [name for name in results[0]["seconds"] if name + OVERLAP in results[0]["seconds"]]
    lines = ["| with overlap / without |" + "".join(f" {_run(result)} |" for result in results)]
    lines.append("|---|" + "---|" * len(results))
    for name in names:
        cells = []
        for result in results:
            pairs = zip(result["seconds"][name + OVERLAP], result["seconds"][name], strict=True)
            low, middle, high = quartiles([a / b for a, b in pairs])
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(results: list[dict[str, Any]]) -> str:
    """Ratios of all step times to their baseline, one column per run: median (quartiles); and the counts' ratios."""
    lines = ["| | target |" + "".join(f" {_run(result)} |" for result in results) + " FLOPs | bytes sent |"]
    lines.append("|---|---|" + "---|" * (len(results) + 2))
    for name, target in results[0]["targets"].items():
        cells = ["" if target is None else f"{target:g}"]
        for result in results:
            baseline = result["seconds"][result["baseline"]]
            low, middle, high = quartiles([a / b for a, b in zip(result["seconds"][name], baseline, strict=True)])
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})" if name != result["baseline"] else "1")
        for kind in ("flops", "sent_bytes"):
            ratios = [_ratio(result, name, kind) for result in results]
            cells.append(span(min(ratios), max(ratios)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(result: dict[str, Any], name: str, kind: str) -> float:
    most, baseline = (max(rank[kind] for rank in result["work"][n]) for n in (name, result["baseline"]))
    return float(most / baseline)


def _work_cells(result: dict[str, Any], name: str) -> str:
    """Target, and the largest rank's FLOPs and bytes sent with their ratios to the baseline's."""
    target = result["targets"][name]
    cells = ["" if target is None else f"{target:g}"]
    for kind, scale in (("flops", 1e9), ("sent_bytes", 1e6)):
        most = max(rank[kind] for rank in result["work"][name])
        cells += [f"{most / scale:.2f}", f"{_ratio(result, name, kind):.3f}"]
    return f" {' | '.join(cells)} |"


def similarity(result: dict[str, Any]) -> str:
    """Median cosine similarity by layer and corner; T / V of the backward corners beside what theory permits."""
    plans, arguments = result["plans"], result["arguments"]
    lines = [
        f"{arguments['ranks']} workers, C = {arguments['coverage']:g}, {result['model']['num_parameters'] / 1e6:.2f}M "
        f"parameters, {arguments['batch']} sequences per worker; median of {arguments['draws']} draws"
    ]
    for step in sorted({record["step"] for record in result["records"]}):
        lines += ["", f"| after {step} dense steps | {' | '.join(plans)} |", "|---|" + "---|" * len(plans)]
        columns = [similarity_by_layer(result, step, corner) for corner in plans]
        for layer in columns[0]:
            lines.append(f"| {layer} | {' | '.join(f'{statistics.median(draws[layer]):.4f}' for draws in columns)} |")
    lines += ["", "| | spectral gap | T / V, mean | lowest, highest | expected | permitted on average | always |"]
    lines.append("|---|---|---|---|---|---|---|")
    for corner, facts in plans.items():
        if bound := facts.get("permitted"):
            ratios = [r["distance"] / r["deviation"] for r in result["records"] if r["corner"] == corner]
            lines.append(
                f"| {corner} | {facts['spectral_gap']:.3f} | {statistics.mean(ratios):.4f} | {min(ratios):.4f}, "
                f"{max(ratios):.4f} | {bound['expected']:.4f} | {bound['on_average']:.4f} | {bound['always']:.4f} |"
            )
    return "\n".join(lines)


def checkpoint_time(result: dict[str, Any]) -> str:
    """Median (quartiles) in seconds, and the ratio to the baseline of the same repeat; sizes on the disk."""
    baseline = result["seconds"][result["baseline"]]
    whats = list(dict.fromkeys(what for own in result["seconds"].values() for what in own))
    lines = [
        f"{result['ranks']} ranks, {result['arguments']['model']}, {result['arguments']['precision']}; seconds",
        "",
        "| | " + " | ".join(whats) + " | MB |",
        "|---|" + "---|" * (len(whats) + 1),
    ]
    for name, own in result["seconds"].items():
        cells = [_against(own[what], baseline.get(what)) if what in own else "" for what in whats]
        lines.append(f"| {name} | {' | '.join(cells)} | {result['bytes'][name] / 1e6:.0f} |")
    return "\n".join(lines)


def _against(seconds: list[float], baseline: list[float] | None) -> str:
    low, middle, high = quartiles(seconds)
    ratio = ""
    if baseline is not None and baseline is not seconds:
        ratio = f", {statistics.median(a / b for a, b in zip(seconds, baseline, strict=True)):.2f}x"
    return f"{middle:.2f} ({low:.2f} to {high:.2f}){ratio}"


MAKERS = {
    "checkpoints": checkpoint_time,
    "step_time": step_time,
    "model_state": model_state,
    "peak_memory": peak_memory,
    "collectives": collectives,
    "similarity": similarity,
    "startup": startup,
    "faults": faults,
}


def summaries(results: list[dict[str, Any]]) -> list[str]:
    """Runs of the same contestants side by side; a table for each set of contestants."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["baseline"], *result["seconds"]), []).append(result)
    tables = [summary(group) for group in groups.values()]
    return tables + [overlap(group) for names, group in groups.items() if any(OVERLAP in name for name in names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=sorted(RESULTS.glob("*.json")))
    parser.add_argument("--summary", action="store_true", help="ratios of all step times side by side, and of peaks")
    options = parser.parse_args()
    results = {path: json.loads(path.read_text()) for path in options.files}
    if options.summary:
        tables = summaries([result for result in results.values() if result["what"] == "step_time"])
        tables += [peak_shares(result) for result in results.values() if result["what"] == "peak_memory"]
        print("\n\n".join(tables))
        return
    for path, result in results.items():
        print(f"### {path.name}\n\n{MAKERS[result['what']](result)}\n")


if __name__ == "__main__":
    main()
