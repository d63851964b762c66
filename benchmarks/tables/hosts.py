"""Markdown tables of the method over each of its hosts, from runs of benchmarks/side_by_side.py."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables.markdown import Result, for_readers, per_repeat, table, with_spread
from benchmarks.tables.systems import caption, memory_and_bytes

BASELINE = "FSDP2"
HOSTS = "hosts"  # as in systems/subjects.py


def hosts_memory(*results: Result) -> str:
    """A table for each run."""
    return "\n\n".join(map(memory_and_bytes, results))


def hosts_time(*results: Result) -> str:
    """For each run the step, its ratio to plain FSDP2's of the same repeat, and what crossed the link, if there is
    one."""
    lines = []
    longest_first = sorted(map(_subjects, results), key=len, reverse=True)  # the others have some of these rows
    names = dict.fromkeys(name for subjects in longest_first for name in subjects)
    for name in names:
        lines.append([for_readers(name), *(cell for result in results for cell in _cells(result, name))])
    heads = [head for result in results for head in _heads(result)]
    facts = caption(results[0]).partition(", ")[2]  # without the ranks, which are in the heads
    repeats = results[0]["arguments"]["repeats"]
    loads = ", ".join(f"{result['groups'][HOSTS]['load']:.1f}" for result in results)
    text = f"{facts}; {repeats} repeats; shares of {BASELINE}'s step; the machine's load when the runs began: {loads}:"
    return f"{text}\n\n" + table(["", *heads], lines)


def _subjects(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = result["groups"][HOSTS]["subjects"]
    return found


def _heads(result: Result) -> list[str]:
    link = result["link"]
    run = f"{result['ranks']} ranks" + (f", {link}" if link else "")
    return [f"{run}, ms", "share", *["MB over the link"] * bool(link)]


def _cells(result: Result, name: str) -> list[str]:
    subjects = _subjects(result)
    if name not in subjects:
        return [""] * len(_heads(result))
    seconds = subjects[name]["seconds"]
    ratios = with_spread(per_repeat(seconds, subjects[BASELINE]["seconds"]))
    cells = [f"{1e3 * statistics.median(seconds):.0f}", "1" if name == BASELINE else ratios]
    if result["link"]:
        cells.append(f"{max(rank['bytes'] for rank in subjects[name]['link_use']) / 1e6:.1f}")
    return cells
