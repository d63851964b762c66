"""Markdown tables of memory and time while a worker starts."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables.markdown import MIB, Result, coverage, table, with_spread

LARGE = 6.74e9  # parameters of the Llama that figures are extrapolated to


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
    if all(row["name"] != result["baseline"] for row in result["results"]):
        return given_back(result)
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


def given_back(result: Result) -> str:
    """A row for each model and contestant that masks: what the process had then, and what it gave back."""
    rows = []
    for row in result["results"]:
        if row["name"] == result["baseline"]:
            continue
        cells = [f"{_most(row, kind):.0f}" for kind in ("process_before", "masked", "given_back")]
        rows.append([row["precision"], row["name"], f"{_weights(row):.0f}", *cells])
    heads = ["precision", "", "dense model in fp32", "process before", "masked", "given back"]
    caption = (
        f"{result['num_ranks']} ranks, {coverage(result['arguments']['coverage'])}, "
        f"{result['arguments']['models'][0]}; MiB, resident:"
    )
    return f"{caption}\n\n" + table(heads, rows)


def startup_time(result: Result) -> str:
    """CPU seconds of one rank by mode, before and after; what they come to for a 7B model, by parameters."""
    factor = LARGE / result["num_parameters"]
    before = _cpu(result["before"])
    rows = []
    for row in result["results"]:
        made = {count: _cpu(runs) for count, runs in row["make"].items()}
        cells = [f"{row['num_elements'] / 1e6:.0f}M", with_spread(before), *map(with_spread, made.values())]
        large = [factor * statistics.median(values) for values in (before, *made.values())]
        cells += [" to ".join(f"{seconds:.0f}" for seconds in large)]
        hashed = [_cpu(row[name]) for name in ("sha256", "digest")]
        large = [factor * statistics.median(values) for values in hashed]
        cells += [*map(with_spread, hashed), " to ".join(f"{seconds:.1f}" for seconds in large)]
        rows.append([row["mode"], *cells])
    threads = [f"after, {count} thread{'s' * (count != '1')}" for count in result["results"][0]["make"]]
    heads = ["", "elements stored", "before", *threads, "7B", "SHA-256", "sums", "7B"]
    caption = (
        f"CPU seconds of one of {result['num_ranks']} ranks, C = 1/2, {result['num_parameters'] / 1e9:.2f}B parameters "
        f"({LARGE / 1e9:g}B extrapolated); median and quartiles:"
    )
    return f"{caption}\n\n" + table(heads, rows)


def _cpu(runs: list[dict[str, float]]) -> list[float]:
    return [run["cpu"] for run in runs]
