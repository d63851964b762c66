"""Markdown tables of benchmarks/side_by_side.py and benchmarks/scaling.py: everybody's memory, traffic and time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.tables.markdown import MIB, Result, for_readers, per_repeat, quartiles, table, with_spread

KINDS = ("weights", "gradients", "optimizer")
PARTS = ("forward", "backward", "exchange", "optimizer", "host")


def side_by_side(result: Result) -> str:
    """Both tables."""
    return f"{memory_and_bytes(result)}\n\n{times(result)}"


def caption(result: Result) -> str:
    arguments = result["arguments"]
    facts = [
        f"{result['ranks']} ranks",
        "" if result["device"] == "CPU" else result["device"],
        f"{result['model']['num_parameters'] / 1e6:.1f}M parameters in {arguments['precision']}",
        f"batch {arguments['micro_batch']} x {result['sequence_length']} per rank",
        f"buckets of {arguments['bucket'] / 1e6:g}M elements",
    ]
    return ", ".join(fact for fact in facts if fact)


def rows(result: Result) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Group, name and figures of every subject once, with all subjects of its group; baselines with the plain ones."""
    seen = set()
    for group, content in result["groups"].items():
        for name, figures in content["subjects"].items():
            if name not in seen:
                yield group, name, figures, content["subjects"]
            seen.add(name)


def memory_and_bytes(result: Result) -> str:
    """Of the rank with the most of each; bytes as a share of the fewest, of all ranks together."""
    lines = []
    for _, name, figures, _ in rows(result):
        ranks = figures["ranks"]
        state = max(ranks, key=lambda rank: sum(rank[kind] for kind in KINDS))
        sizes = [*(state[kind] for kind in KINDS), sum(state[kind] for kind in KINDS)]
        sizes += [max(rank[what] for rank in ranks) for what in ("activations", "peak")]
        sent = max(rank["sent"] for rank in ranks) / 1e6
        calls = max(sum(rank["calls"].values()) for rank in ranks)
        cells = [*(f"{size / MIB:.1f}" for size in sizes), f"{sent:.2f}", share_of_fewest(ranks), str(calls)]
        lines.append([for_readers(name), *cells])
    heads = (*KINDS, "state", "activations", "peak", "MB sent", "of the fewest", "collectives")
    return f"{caption(result)}; MiB, of the rank with the most:\n\n" + table(["", *heads], lines)


def share_of_fewest(ranks: list[dict[str, Any]]) -> str:
    """Empty where nothing has to be sent."""
    sent, fewest = (sum(rank[what] for rank in ranks) for what in ("sent", "bound"))
    return f"{sent / fewest:.3f}" if fewest else ""


def times(result: Result) -> str:
    """Ratios of the same repeat; parts of a step in which nothing overlaps, mean over ranks, median of the steps. The
    baseline's own milliseconds of each group are shown, since groups are of different minutes."""
    lines = []
    for group, name, figures, subjects in rows(result):
        stock = f"ZeRO-{group[-1]}"
        seconds = figures["seconds"]
        medians = [statistics.median(of) for of in (seconds, subjects[result["baseline"]]["seconds"])]
        cells = [*(f"{1e3 * median:.0f}" for median in medians), _ratio(name, seconds, result["baseline"], subjects)]
        cells.append(_ratio(name, seconds, stock, subjects) if stock in subjects else "")
        cells += [f"{1e3 * part_seconds(figures, part):.0f}" if figures["splits"] else "" for part in PARTS]
        lines.append([for_readers(name), *cells])
    baseline = result["baseline"]
    heads = ("step, ms", f"{baseline}'s beside it", f"of {baseline}'s", "of ZeRO's at its stage", *PARTS)
    repeats = result["arguments"]["repeats"]
    return f"{caption(result)}; {repeats} repeats; parts in ms:\n\n" + table(["", *heads], lines)


def _ratio(name: str, seconds: list[float], baseline: str, subjects: dict[str, Any]) -> str:
    return "1" if name == baseline else with_spread(per_repeat(seconds, subjects[baseline]["seconds"]))


def part_seconds(figures: dict[str, Any], part: str) -> float:
    """Of one part of a step."""
    return statistics.median(statistics.mean(rank[part] for rank in ranks) for ranks in figures["splits"])


def scaling(*results: Result) -> str:
    """A table for each way to scale; a row for each subject, columns for numbers of ranks."""
    return "\n\n".join(_scaled(way, results) for way in results[0]["ways"])


def _scaled(way: str, results: tuple[Result, ...]) -> str:
    names = dict.fromkeys(name for result in results for name in result["ways"][way]["subjects"])
    lines = []
    for name in names:
        found = [result["ways"][way]["subjects"].get(name) for result in results]
        lines.append([for_readers(name), *(_scaled_cell(figures) for figures in found)])
    first = results[0]
    batches = "1 sequence per rank" if way == "weak" else f"{first['arguments']['sequences']} sequences in all"
    text = f"{way} scaling, {place(first)}, {batches} of {first['sequence_length']}, "
    text += f"{first['model']['num_parameters'] / 1e6:.1f}M parameters; "
    text += "ms of a step (quartiles), CPU ms and MB sent of a rank:"
    return f"{text}\n\n" + table(["", *(_ranks(result) for result in results)], lines)


def place(result: Result) -> str:
    """Where ranks ran: the GPU, or how many cores they shared."""
    cores = result["provenance"]["cores"]
    return f"{cores} cores" if result["device"] == "CPU" else str(result["device"])


def _ranks(result: Result) -> str:
    return f"{result['ranks']} rank{'s' * (result['ranks'] > 1)}"


def _scaled_cell(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return ""
    low, middle, high = (1e3 * second for second in quartiles(figures["seconds"]))
    spent = 1e3 * statistics.median(statistics.mean(ranks) for ranks in figures["cpu_seconds"])
    sent = statistics.mean(rank["sent"] for rank in figures["ranks"]) / 1e6
    return f"{middle:.0f} ({low:.0f} to {high:.0f}); {spent:.0f}; {sent:.1f}"


def growth(*results: Result) -> str:
    """Of one rank, by numbers of layers and ranks."""
    cells: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for result in results:
        for row in result["results"]:
            subnetworks = f", k = {row['num_subnetworks']}" if row["num_subnetworks"] else ""
            key = (for_readers(row["name"]) + subnetworks, row["num_layers"])
            cells.setdefault(key, {})[result["ranks"]] = row
    ranks = [result["ranks"] for result in results]
    lines = []
    for (name, num_layers), found in cells.items():
        units = next((str(row["num_units"]) for row in found.values() if "num_units" in row), "")
        lines.append([name, str(num_layers), units, *(_growth_cell(found.get(number)) for number in ranks)])
    heads = ("", "layers", "units", *(f"{number} ranks" for number in ranks))
    text = "One rank's step in ms of its thread (quartiles); collectives; seconds to build its engine:"
    return f"{text}\n\n" + table(heads, lines)


def _growth_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    low, middle, high = (1e3 * second for second in quartiles(row["seconds"]))
    return f"{middle:.1f} ({low:.1f} to {high:.1f}); {sum(row['calls'].values())}; {row['building_seconds']:.1f}"
