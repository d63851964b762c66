"""Markdown tables of memory while a worker starts."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.markdown import MIB, Result, coverage, table


def _most(row: dict[str, Any], kind: str) -> float:
    """MiB of the rank with the most."""
    return float(max(rank[kind] for rank in row["ranks"]) / MIB)


def _weights(row: dict[str, Any]) -> float:
    """MiB of the dense model in fp32."""
    return float(4 * row["num_parameters"] / MIB)


def _groups(result: Result) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """By model and precision the row of each contestant."""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in result["results"]:
        groups.setdefault((row["model"], row["precision"]), {})[row["name"]] = row
    return groups


def startup(result: Result) -> str:
    """A row for each contestant: its peak as a share of plain DeepSpeed's and of the dense model's weights."""
    rows = []
    for (model, precision), contestants in _groups(result).items():
        baseline = _most(contestants[result["baseline"]], "peak")
        for name, row in contestants.items():
            peak, weights = _most(row, "peak"), _weights(row)
            sizes = [_most(row, kind) for kind in ("at_end", "process_peak", "process_before")]
            cells = [f"{model} ({row['num_shared'] / row['num_parameters']:.0%})", precision, name, f"{weights:.0f}"]
            cells += [f"{peak:.0f}", f"{peak / baseline:.2f}", f"{peak / weights:.2f}"]
            rows.append([*cells, *(f"{size:.0f}" for size in sizes)])
    heads = ("weights", "peak", "share", "of weights", "at the end", "process", "before")
    caption = (
        f"{result['num_ranks']} ranks, {coverage(result['arguments']['coverage'])}; MiB; shares are of the peak of "
        f"{result['baseline']}, and of the dense model's weights in fp32:"
    )
    return f"{caption}\n\n" + table(["model (shared by all workers)", "precision", "", *heads], rows)


def startup_side_by_side(*results: Result) -> str:
    """A row for each run: the contestants' peaks, and the last one's as a share of the first one's."""
    rows, names = [], [row["name"] for row in results[0]["results"]]
    contestants = list(dict.fromkeys(names))
    for result in results:
        for (model, precision), group in _groups(result).items():
            peaks = [_most(group[name], "peak") for name in contestants]
            last = group[contestants[-1]]
            shared = f"{last['num_shared'] / last['num_parameters']:.0%}"
            cells = [str(result["num_ranks"]), model, shared, precision, *(f"{peak:.0f}" for peak in peaks)]
            rows.append([*cells, f"{peaks[-1] / peaks[0]:.2f}", f"{peaks[-1] / _weights(last):.2f}"])
    heads = ["ranks", "model", "shared by all", "precision", *contestants, "of ZeRO-1", "of the dense model in fp32"]
    caption = (
        f"Peak of live tensors in MiB, of the rank with the most; {coverage(results[0]['arguments']['coverage'])}:"
    )
    return f"{caption}\n\n" + table(heads, rows)
