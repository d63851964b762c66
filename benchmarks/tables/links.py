"""Markdown tables of links: what collectives get out of one, predictions, and the time to a loss."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Result, for_readers, per_repeat, table, with_spread

TOLERANCE = 0.01  # nats above what ZeRO-2 ends with that count as reached: an evaluation's noise


def link_rates(*results: Result) -> str:
    """Milliseconds that a collective takes by itself and bytes per second; a column for each link."""
    rows = []
    for name in results[0]["lines"]:
        cells = []
        for result in results:
            line = result["lines"][name]
            cells += [f"{1e3 * line['alpha']:.2f}", f"{line['beta'] / 1e6:.1f}"]
        rows.append([name, *cells])
    heads = [head for result in results for head in (f"alpha, ms, {result['link']}", f"beta, MB/s, {result['link']}")]
    first = results[0]
    return f"{first['ranks']} ranks on {first['nodes']} nodes:\n\n" + table(["", *heads], rows)


def one_way(*results: Result) -> str:
    """Steps with one possible cause each taken away, and how long the link carried both directions in one at C = 1."""
    name = "forward x block C=1"
    rows = []
    for result in results:
        plain, own = (result["seconds"][which] for which in ("zero2", name))
        use = [f"{1e3 * result['link_use'][name][0][ways]:.0f}" for ways in ("both", "one", "none")]
        times = [f"{1e3 * statistics.median(seconds):.0f}" for seconds in (plain, own)]
        rows.append([_variant(result), *times, with_spread(per_repeat(own, plain)), *use])
    heads = ["", "ZeRO-2, ms", "C = 1, ms", "ratio", "link: both ways, ms", "one way", "nothing"]
    return f"{results[0]['ranks']} ranks, {results[0]['link']} between them, without overlap:\n\n" + table(heads, rows)


def _variant(result: Result) -> str:
    arguments = result["arguments"]
    words = ["gloo's all-to-all" if arguments.get("all_to_all_of_gloo") else "receives first"]
    words += ["window kept when idle"] * ("tcp_slow_start_after_idle=0" in (result["link_setting"] or ""))
    words += ["one bucket"] * (arguments["bucket"] > result["model"]["num_parameters"])
    return ", ".join(words)


def predicted_links(result: Result) -> str:
    """Milliseconds of a step; in brackets if all communication were hidden."""
    facts, systems = result["facts"], list(result["predicted"][0]["systems"])
    rows = []
    for row in result["predicted"]:
        cells = [_milliseconds(row["systems"][system]) for system in systems]
        rows.append([f"{row['gpus']} GPUs, {row['between']}", *cells])
    caption = (
        f"{result['arguments']['model']} in bf16, {facts['tokens']} tokens per GPU and step at "
        f"{facts['flops_per_second'] / 1e12:g} TFLOP/s, nodes of {facts['ranks_per_node']}, "
        f"{facts['subnetworks']} subnetworks; ms (with perfect overlap):"
    )
    return f"{caption}\n\n" + table(["", *map(_system, systems)], rows)


def _milliseconds(parts: Mapping[str, float]) -> str:
    compute, link = parts["compute"], parts["link"]
    return f"{1e3 * (compute + link):.0f} ({1e3 * max(compute, link):.0f})"


def _system(name: str) -> str:
    return for_readers(name).removeprefix("forward x block, ")


def predicted_beside_measured(result: Result, fast: Result, *measured: Result) -> str:
    """Of the namespaces: seconds of a step, predicted and measured.

    Args:
        fast: steps without a slow link.
        measured: over the links of the result's checks, in their order.
    """
    rows = []
    for name, without in fast["seconds"].items():
        cells = [with_spread(without)]
        for check, steps in zip(result["checks"], measured, strict=True):
            step = check["steps"][name]
            assert step["measured"] == statistics.median(steps["seconds"][name]), "run predict_links.py again"
            ratio = f"{step['predicted'] / step['measured']:.2f}"
            cells += [f"{step['predicted']:.2f}", with_spread(steps["seconds"][name]), ratio]
        rows.append([for_readers(name), *cells])
    heads = [head for c in result["checks"] for head in (f"predicted, {c['link']}", "measured", "ratio")]
    return f"{fast['ranks']} ranks; seconds of a step:\n\n" + table(["", "without a slow link", *heads], rows)


def time_to_loss(*results: Result) -> str:
    """Seconds until the dense loss is that of ZeRO-2's end, mean over seeds, and as a share of ZeRO-2's."""
    first = results[0]
    heads = ["", "steps", "dense loss at the end"]
    for result in results:
        heads += [f"seconds, {result['link']}", "share"]
    rows = []
    every = {(run["name"], run["seed"]): run for result in results for run in result["results"]}  # losses are the same
    for name in dict.fromkeys(name for name, _ in every):
        runs = [run for (own, _), run in every.items() if own == name]
        losses = [run["curve"][-1][2] for run in runs]
        cells = [for_readers(name), str(runs[0]["steps"]), f"{statistics.mean(losses):.3f}"]
        for result in results:
            cells += _until(result, name)
        rows.append(cells)
    seeds = sorted({seed for _, seed in every})
    caption = (
        f"{first['ranks']} nodes, {first['model']['num_parameters'] / 1e6:.2f}M parameters, batch "
        f"{first['arguments']['micro_batch']} x {first['sequence_length']} per rank; mean of {len(seeds)} seeds; "
        f"the loss is ZeRO-2's last of the same seed + {TOLERANCE}:"
    )
    return f"{caption}\n\n" + table(heads, rows)


def _until(result: Result, name: str) -> list[str]:
    """Mean seconds and share of ZeRO-2's; how many seeds got there, if not all."""
    own, plain = (seconds_to_loss(result, which) for which in (name, "zero2"))
    reached = [value for value in own.values() if value is not None]
    if not own:
        return ["", ""]
    if not reached:
        return ["not reached", ""]
    shares = [value / base for seed, value in own.items() if value and (base := plain[seed])]
    note = "" if len(reached) == len(own) else f" ({len(reached)} of {len(own)} seeds)"
    return [f"{statistics.mean(reached):.1f}{note}", f"{statistics.mean(shares):.2f}"]


def seconds_to_loss(result: Result, name: str) -> dict[int, float | None]:
    """By seed: of the first evaluation at or below the loss; None if there is none."""
    goals = {run["seed"]: run["curve"][-1][2] + TOLERANCE for run in result["results"] if run["name"] == "zero2"}
    found: dict[int, float | None] = {}
    for run in result["results"]:
        if run["name"] == name and run["seed"] in goals:
            points: list[Any] = run["curve"]
            found[run["seed"]] = next((taken for _, taken, loss in points if loss <= goals[run["seed"]]), None)
    return found
