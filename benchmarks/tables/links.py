"""Markdown tables of links: what collectives get out of one, and predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.common.links import lines_of
from benchmarks.tables.markdown import Result, for_readers, per_repeat, table, with_spread


def link_rates(*results: Result) -> str:
    """Milliseconds that a collective takes by itself and bytes per second; a column for each link."""
    lines = [lines_of(result["seconds"]) for result in results]
    rows = []
    for name in lines[0]:
        cells = []
        for of_link in lines:
            cells += [f"{1e3 * of_link[name].latency:.2f}", f"{of_link[name].bandwidth / 1e6:.1f}"]
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


def predicted_between_nodes(result: Result) -> str:
    """Of nodes with several ranks: bytes between them, and by how much the slower link makes a step longer."""
    check = result["between_nodes"]
    rows = []
    for name, step in check["steps"].items():
        cells = []
        for what, scale, digits in (("bytes", 1e6, 1), ("longer", 1, 2)):
            predicted, measured = (step[which][what] for which in ("predicted", "measured"))
            cells += [
                f"{predicted / scale:.{digits}f}",
                f"{measured / scale:.{digits}f}",
                f"{predicted / measured:.2f}",
            ]
        rows.append([for_readers(name), *cells])
    fast, slow = check["links"]
    heads = ("", "MB each way, predicted", "measured", "ratio", "seconds more, predicted", "measured", "ratio")
    return f"2 nodes of 4 ranks; a step over {slow} beside one over {fast}:\n\n" + table(heads, rows)
