"""Markdown tables of what is counted, not timed: model state, peaks of memory, collectives, kills."""

from __future__ import annotations

import itertools
import statistics
from typing import Any, NamedTuple

from benchmarks.common.models import num_parameters
from benchmarks.tables.markdown import MIB, Result, coverage, span, table

KINDS = ("weights", "gradients", "optimizer")
MESSAGES = ("send", "recv_")


def _run(result: Result) -> str:
    return f"{result['num_ranks']} ranks, {coverage(result['arguments']['coverage'])}"


def model_state(result: Result) -> str:
    """Measured bytes (mean over ranks) beside the formulas' figure, with the deviation; and peaks."""
    rows = []
    for row in result["results"]:
        means = {kind: statistics.mean(rank[kind] for rank in row["ranks"]) for kind in KINDS}
        cells = [f"{means[k] / MIB:.2f} ({100 * (means[k] / row['expected'][k] - 1):+.1f}%)" for k in KINDS]
        peak = max(rank["peak"] for rank in row["ranks"]) / MIB
        rows.append([row["precision"], row["name"], *cells, f"{sum(means.values()) / MIB:.2f}", f"{peak:.1f}"])
    caption = f"{_run(result)}; MiB, mean over ranks (deviation from the formulas):"
    return f"{caption}\n\n" + table(["precision", "", *KINDS, "sum", "peak of live tensors"], rows)


class Share(NamedTuple):
    """A rank's peak as a share of what its step has to hold, and what both are (bytes)."""

    share: float
    state: int
    peak: int
    step_gradient: int
    share_with_gradient: float


def worst_share(row: dict[str, Any]) -> Share:
    """Of the rank whose peak is the largest share of state and two buckets; also with the step's fp32 gradient."""
    shares = []
    for rank, step in zip(row["ranks"], row["step_gradients"], strict=True):
        state = sum(rank[kind] for kind in KINDS)
        held = state + row["two_buckets"]
        shares.append(Share(rank["peak"] / held, state, rank["peak"], step, rank["peak"] / (held + step)))
    return max(shares)


def peak_memory(result: Result) -> str:
    """The rank whose peak is the largest share of what it has to hold: state and two buckets."""
    arguments = result["arguments"]
    rows = []
    for row in result["results"]:
        worst = worst_share(row)
        sizes = (worst.state, row["two_buckets"], worst.peak)
        cells = [*(f"{size / MIB:.1f}" for size in sizes), f"{worst.share:.3f}"]
        cells += [f"{worst.step_gradient / MIB:.1f}", f"{worst.share_with_gradient:.3f}"]
        rows.append([row["precision"], row["name"], *cells])
    heads = ("state", "two buckets", "peak", "share", "fp32 gradient in the step", "share with it")
    caption = (
        f"{_run(result)}, buckets of {arguments['bucket'] / 1e6:g}M elements"
        f"{', overlap_comm' * arguments['overlap']}; MiB; limit {result['limit']:g}:"
    )
    return f"{caption}\n\n" + table(["precision", "", *heads], rows)


def peak_shares(*results: Result) -> str:
    """Peaks as shares of state and two buckets, by stage: lowest and highest of the regime's strategies."""
    stages = sorted({_stage(row["name"]) for row in results[0]["results"]})
    heads = [f"stage {stage}{more}" for more in ("", ", gradient counted in") for stage in stages]
    rows = []
    for result in results:
        for name, group in _by_regime(result).items():
            cells = [name, str(result["num_ranks"])]
            for kind, stage in itertools.product(("share", "share_with_gradient"), stages):
                worst = [worst_share(row) for row in group if _stage(row["name"]) == stage]
                cells.append(span([getattr(share, kind) for share in worst]))
            rows.append(cells)
    arguments, size = results[0]["arguments"], num_parameters(results[0]["model"])
    caption = (
        f"{coverage(arguments['coverage'])}, {size / 1e6:.0f}M parameters, buckets of {arguments['bucket'] / 1e6:g}M "
        "elements; each range is over both strategies:"
    )
    return f"{caption}\n\n" + table(["peak / (state + two buckets)", "ranks", *heads], rows)


def _by_regime(result: Result) -> dict[str, list[dict[str, Any]]]:
    """Rows of one precision and regime, in the order of the result."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in result["results"]:
        regime = row["name"].split(" x ")[0] if " x " in row["name"] else "plain ZeRO"
        groups.setdefault(f"{row['precision']}, {regime}", []).append(row)
    return groups


def _stage(name: str) -> int:
    """Of a contestant's name, which ends with it."""
    return int(name[-1])


def collectives(result: Result) -> str:
    """Calls of the rank that makes most, by number of layers, for one bucket and for small ones."""
    layers = sorted({row["num_layers"] for row in result["results"]})
    share = result["arguments"]["share"]
    heads = [f"{count} layers, {kind}" for kind in ("one bucket", f"{share} buckets' worth") for count in layers]
    rows = []
    for name in dict.fromkeys(row["name"] for row in result["results"]):
        by_run = {(row["share"], row["num_layers"]): row for row in result["results"] if row["name"] == name}
        cells = [str(_most_calls(by_run[kind, count])) for kind in (None, share) for count in layers]
        units = [by_run[None, count]["num_units"] for count in layers]
        rows.append([name, ", ".join(map(str, units)) if units[0] else "", *cells])
    return f"{_run(result)}; collectives in a step:\n\n" + table(["", "units", *heads], rows)


def _most_calls(row: dict[str, Any]) -> int:
    """Of the rank with most; messages between two ranks, of which an all-to-all over gloo consists, are no
    collectives."""
    return max(sum(count for name, count in calls.items() if name not in MESSAGES) for calls in row["ranks"])


def faults(*results: Result) -> str:
    """Where kills fell, and what came of them."""
    return "\n\n".join(map(_faults, results))


def _faults(result: Result) -> str:
    caption = (
        f"{result['kills']} kills of one rank or two of {result['ranks']}, {result['starts']} starts{_works(result)}; "
        f"{len(result['problems'])} problems; a rank that was left alone ended after at most "
        f"{result['slowest_survivor_seconds']:g} s:"
    )
    rows = [(place, str(count)) for place, count in result["kills_by_place"].items()]
    return f"{caption}\n\n" + table(["killed at", "times"], rows)


def _works(result: Result) -> str:
    count = result.get("kills_of_exports", result.get("kills_of_works_on_files", {}).get("export"))
    return f", {count} kills of exports" if count else ""
