"""Markdown table of the time to a loss over slow links."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean
from typing import Any

from benchmarks.tables.markdown import Result, for_readers, table

BASELINE = "zero2"
TOLERANCE = 0.01  # nats above what the baseline ends with that count as reached: an evaluation's noise


def time_to_loss(*results: Result) -> str:
    """For each link seconds per step, and step and seconds where the dense loss is that of the baseline's end; means
    over seeds, and shares of the baseline's."""
    first = results[0]
    heads = ["", "steps", "dense loss at the end"]
    for result in results:
        heads += [f"ms per step, {result['link']}", "share", "step of the hit", "seconds", "share"]
    every = {(run["name"], run["seed"]): run for result in results for run in result["results"]}  # losses are the same
    rows = []
    for name in dict.fromkeys(name for name, _ in every):
        runs = [run for (own, _), run in every.items() if own == name]
        losses = [run["curve"][-1][2] for run in runs]
        cells = [for_readers(name), str(runs[0]["steps"]), f"{mean(losses):.3f}"]
        for result in results:
            cells += [*_pace(result, name), *_until(result, name)]
        rows.append(cells)
    seeds = sorted({seed for _, seed in every})
    caption = (
        f"{first['ranks']} nodes, {first['model']['num_parameters'] / 1e6:.2f}M parameters, batch "
        f"{first['arguments']['micro_batch']} x {first['sequence_length']} per rank; mean of {len(seeds)} seeds; "
        f"the loss is ZeRO-2's last of the same seed + {TOLERANCE}:"
    )
    return f"{caption}\n\n" + table(heads, rows)


def seconds_per_step(result: Result, name: str) -> dict[int, float]:
    """By seed, of all of its steps."""
    return {run["seed"]: run["curve"][-1][1] / run["curve"][-1][0] for run in result["results"] if run["name"] == name}


def _pace(result: Result, name: str) -> list[str]:
    own, plain = (seconds_per_step(result, which) for which in (name, BASELINE))
    if not own:
        return ["", ""]
    shares = [value / plain[seed] for seed, value in own.items() if seed in plain]
    return [f"{1e3 * mean(own.values()):.0f}", f"{mean(shares):.2f}" if shares else ""]


def _until(result: Result, name: str) -> list[str]:
    """Mean step, seconds and share of the baseline's; how many seeds got there, if not all."""
    own, plain = (hits(result, which) for which in (name, BASELINE))
    reached = [hit for hit in own.values() if hit is not None]
    if not own:
        return ["", "", ""]
    if not reached:
        return ["", "not reached", ""]
    shares = [hit[1] / base[1] for seed, hit in own.items() if hit and (base := plain[seed])]
    note = "" if len(reached) == len(own) else f" ({len(reached)} of {len(own)} seeds)"
    steps, seconds = (mean(values) for values in zip(*reached, strict=True))
    return [f"{steps:.0f}", f"{seconds:.1f}{note}", f"{mean(shares):.2f}"]


def hits(result: Result, name: str) -> dict[int, tuple[float, float] | None]:
    """By seed: step and seconds where the loss is first low enough, on a line between the two evaluations around it;
    None if it never is. Without the baseline's run of a seed there is no loss to reach."""
    goals = {run["seed"]: run["curve"][-1][2] + TOLERANCE for run in result["results"] if run["name"] == BASELINE}
    return {
        run["seed"]: crossing(run["curve"], goals[run["seed"]])
        for run in result["results"]
        if run["name"] == name and run["seed"] in goals
    }


def crossing(curve: list[Any], goal: float) -> tuple[float, float] | None:
    """
    Args:
        curve: steps, seconds and loss at each evaluation.
    """
    if curve[0][2] <= goal:  # nothing is known of before
        return curve[0][0], curve[0][1]
    for (step, seconds, loss), (next_step, next_seconds, next_loss) in pairwise(curve):
        if next_loss <= goal:
            part = (loss - goal) / (loss - next_loss)
            return step + part * (next_step - step), seconds + part * (next_seconds - seconds)
    return None
