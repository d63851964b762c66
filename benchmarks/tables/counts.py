"""Markdown tables of what is counted, not timed: model state, peaks of memory, collectives."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

MIB = 2**20


def model_state(result: dict[str, Any]) -> str:
    """Measured bytes (mean over ranks) beside the table's figure, with the deviation; and peaks."""
    lines = [
        f"{result['num_ranks']} ranks, C = {result['arguments']['coverage']:g}; "
        "MiB, mean over ranks (deviation from the table)",
        "",
        "| precision | | weights | gradients | optimizer | sum | peak of live tensors |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        cells = []
        means = {kind: statistics.mean(rank[kind] for rank in row["ranks"]) for kind in row["expected"]}
        for kind, expected in row["expected"].items():
            cells.append(f"{means[kind] / MIB:.2f} ({100 * (means[kind] / expected - 1):+.1f}%)")
        total = sum(means.values()) / MIB
        peak = max(rank["peak"] for rank in row["ranks"]) / MIB
        lines.append(f"| {row['precision']} | {row['name']} | {' | '.join(cells)} | {total:.2f} | {peak:.1f} |")
    return "\n".join(lines)


def peak_memory(result: dict[str, Any]) -> str:
    """The rank whose peak is the largest share of what it has to be: state and two buckets."""
    arguments = result["arguments"]
    lines = [
        f"{result['num_ranks']} ranks, C = {arguments['coverage']:g}, buckets of {arguments['bucket'] / 1e6:g}M "
        f"elements{', overlap_comm' * arguments['overlap']}; MiB; limit {result['limit']:g}",
        "",
        "| precision | | state | two buckets | peak | share | fp32 gradient in the step | share with it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        share, state, peak, step, with_step = worst_share(row)
        lines.append(
            f"| {row['precision']} | {row['name']} | {state / MIB:.1f} | {row['two_buckets'] / MIB:.1f} "
            f"| {peak / MIB:.1f} | {share:.3f} | {step / MIB:.1f} | {with_step:.3f} |"
        )
    return "\n".join(lines)


def worst_share(row: dict[str, Any]) -> tuple[float, float, float, float, float]:
    """Of the rank whose peak is the largest share of state and two buckets: that share, state, peak and the step's fp32
    gradient (bytes), and the share with that gradient counted in."""
    shares = []
    for rank, step in zip(row["ranks"], row["step_gradients"], strict=True):
        state = sum(rank[kind] for kind in ("weights", "gradients", "optimizer"))
        allowed = state + row["two_buckets"]
        shares.append((rank["peak"] / allowed, state, rank["peak"], step, rank["peak"] / (allowed + step)))
    return max(shares)


def peak_shares(result: dict[str, Any]) -> str:
    """Peaks as shares of state and two buckets, by stage: lowest and highest of the regime's strategies."""
    stages = sorted({_stage(row["name"]) for row in result["results"]})
    heads = [f"stage {stage}{more}" for more in ("", ", gradient counted in") for stage in stages]
    lines = [f"| peak / (state + two buckets) | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in result["results"]:
        regime = row["name"].split(" x ")[0] if " x " in row["name"] else "plain ZeRO"
        rows.setdefault(f"{row['precision']}, {regime}", []).append(row)
    for name, group in rows.items():
        cells = []
        for index, stage in itertools.product((0, -1), stages):
            found = [worst_share(row)[index] for row in group if _stage(row["name"]) == stage]
            cells.append(span(min(found), max(found)))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _stage(name: str) -> int:
    """Of a contestant's name, which ends with it."""
    return int(name[-1])


def span(low: float, high: float) -> str:
    """One number where both look the same."""
    texts = list(dict.fromkeys(f"{value:.2f}" for value in (low, high)))
    return " to ".join(texts)


def collectives(result: dict[str, Any]) -> str:
    """Calls of the rank that makes most, by number of layers, for one bucket and for small ones."""
    layers = sorted({row["num_layers"] for row in result["results"]})
    share = result["arguments"]["share"]
    heads = [f"{count} layers, {kind}" for kind in ("one bucket", f"{share} buckets' worth") for count in layers]
    lines = [f"{result['num_ranks']} ranks, C = {result['arguments']['coverage']:g}; collectives in a step", ""]
    lines += [f"| | units | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    for name in dict.fromkeys(row["name"] for row in result["results"]):
        rows = {(r["share"], r["num_layers"]): r for r in result["results"] if r["name"] == name}
        cells = [str(most_calls(rows[kind, count])) for kind in (None, share) for count in layers]
        units = [rows[None, count]["num_units"] for count in layers]
        lines.append(f"| {name} | {', '.join(map(str, units)) if units[0] else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def startup(result: dict[str, Any]) -> str:
    """Peaks of the rank that has most, beside the dense model's weights and as a share of plain DeepSpeed's peak."""
    lines = [
        f"{result['num_ranks']} ranks, C = {result['arguments']['coverage']:g}; MiB; shares are of the peak of "
        f"{result['baseline']}, and of the dense model's weights in fp32",
        "",
        "| model (shared by all workers) | precision | | weights | peak | share | of weights | at the end | process "
        "| before |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    baselines = {}
    for row in result["results"]:
        peak, resting, process, before = (
            max(rank[kind] for rank in row["ranks"]) / MIB
            for kind in ("peak", "at_end", "process_peak", "process_before")
        )
        if row["name"] == result["baseline"]:
            baselines[row["model"], row["precision"]] = peak
        share = peak / baselines[row["model"], row["precision"]]
        weights = 4 * row["num_parameters"] / MIB
        lines.append(
            f"| {row['model']} ({row['num_shared'] / row['num_parameters']:.0%}) | {row['precision']} | {row['name']} "
            f"| {weights:.0f} | {peak:.0f} | {share:.2f} | {peak / weights:.2f} | {resting:.0f} | {process:.0f} "
            f"| {before:.0f} |"
        )
    return "\n".join(lines)


def faults(result: dict[str, Any]) -> str:
    """Where kills fell, and what came of them."""
    lines = [
        f"{result['kills']} kills of one rank or both of {result['ranks']}, {result['starts']} starts; "
        f"{len(result['problems'])} problems; a rank that was left alone ended after at most "
        f"{result['slowest_survivor_seconds']:g} s",
        "",
        "| killed at | times |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| {place} | {count} |" for place, count in result["kills_by_place"].items())])


def most_calls(row: dict[str, Any]) -> int:
    """Of the rank with most."""
    return max(sum(calls.values()) for calls in row["ranks"])
