"""Make the tables of docs/results.md and the figure and tables of the README from raw figures in benchmarks/results.

    python benchmarks/tables.py           # writes docs/results.md, README.md and docs/figure.svg
    python benchmarks/tables.py --check   # only check whether they are current
    python benchmarks/tables.py --print quality-all families-reasons  # tables, also those of no document

Tables are between `<!-- name -->` and `<!-- /name -->`. If its raw figures are missing, a table says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks import families_table, figures
from benchmarks.figures import MIB, SDP, most, ratio_of_steps
from benchmarks.images.table import image_rows
from benchmarks.quality import IN_README, IN_RESULTS, LABELS, NARROW, Figures, many_passes_rows, quality_rows

ROOT = Path(__file__).parents[1]
LESS_SHOWN = ("ZeRO-0", "ZeRO-2", "forward x block + ZeRO-2 C=0.5", "forward x block + FSDP2 C=1")
LOSS_TOLERANCE = 0.01  # nats; equal algorithms differ by less after hundreds of steps
Result = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is not current")
    parser.add_argument("--print", nargs="+", choices=TABLES, default=[], help="print these tables, and write nothing")
    options = parser.parse_args()
    if options.print:
        print("\n\n".join(f"{name}\n\n{made_from(name, results_of(ROOT))}" for name in options.print))
        return
    made = outputs(ROOT)
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if options.check and stale:
        sys.exit(f"not current: {', '.join(str(path.relative_to(ROOT)) for path in stale)}; run benchmarks/tables.py")
    for path in stale:
        path.write_text(made[path], encoding="utf-8")


def results_of(root: Path) -> dict[str, Result]:
    """Raw figures by name."""
    folder = root / "benchmarks/results"
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    if cells := sorted((folder / "images").glob("*.json")):
        results["images"] = {"cells": [json.loads(path.read_text(encoding="utf-8")) for path in cells]}
    return results


def outputs(root: Path) -> dict[Path, str]:
    """Expected content of each file."""
    results, docs = results_of(root), root / "docs"
    documents = (root / "README.md", docs / "results.md")
    found = {path: filled(path.read_text(encoding="utf-8"), results) for path in documents}
    if compared := results.get("compare_4_ranks"):
        found[docs / "figure.svg"] = figures.overview(compared)
    return found


def filled(document: str, results: Mapping[str, Result]) -> str:
    """`document`, with each table made from the raw figures.

    Raises:
        ValueError: it has markers of an unknown table.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ValueError(f"no table is named {name!r}; there are {', '.join(TABLES)}")
        return f"<!-- {name} -->\n{made_from(name, results)}\n<!-- /{name} -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", fill, document, flags=re.DOTALL)


def made_from(name: str, results: Mapping[str, Result]) -> str:
    """A table by name."""
    make, files = TABLES[name]
    missing = [file for file in files if file not in results]
    return f"*Not measured yet: {', '.join(missing)}.*" if missing else make(*(results[file] for file in files))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown table with right-aligned numbers."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def label(name: str) -> str:
    """A contestant's name for readers, such as "SDP block C = 1/2, ZeRO-1"."""
    match = re.fullmatch(r"(\w+) x (\w+) \+ (.*) C=([\d.]+)( k=\d+)?", name)
    if match is None:
        return name.replace("DDP, activation checkpointing", "DDP, checkpointing")
    regime, strategy, host, coverage, subnetworks = match.groups()
    mode = strategy if regime == "forward" else f"{regime} {strategy}"
    return f"SDP {mode} C = {Fraction(coverage).limit_denominator(64)}, {host}{subnetworks or ''}"


def compare(result: Result, sizes: Result) -> str:
    """The contestants by which a user decides, on CPU ranks and with 1B parameters on a GPU."""
    contestants, arguments = result["contestants"], result["arguments"]
    on_gpu = {_as_in_compare(cell["name"]): cell for cell in sizes["results"] if _is_shown(cell, "1B")}
    rows = []
    for name in (name for name in contestants if name not in LESS_SHOWN):
        peak, sent = most(contestants, name, "peak") / MIB, most(contestants, name, "sent") / 1e6
        cells = [f"{peak:.1f}", f"{sent:.1f}", spread(ratio_of_steps(contestants, name, "DDP"))]
        cell = on_gpu.get(name)
        cells += ["", ""] if cell is None else [_gib(cell["peak"]), f"{1e3 * cell['median']:.0f}"]
        rows.append([label(name), *cells])
    milliseconds = 1e3 * statistics.median(contestants["DDP"]["seconds"])
    caption = f"{_place(result)}, batch {arguments['micro_batch']} x {arguments['sequence']} per rank; "
    caption += f"{arguments['repeats']} repeats, DDP's step takes {milliseconds:.0f} ms; "
    caption += f"load before the run {result['load']:.1f}; {_commit(result)}. {_place_of_sizes(sizes)}:"
    return f"{caption}\n\n" + table(["", "peak, MiB", "sent, MB", "step / DDP's", "1B: peak, GiB", "step, ms"], rows)


def _as_in_compare(name: str) -> str:
    """A contestant's name in compare.py, of that in on_gpu.py."""
    match = re.fullmatch(r"SDP \+ (.*), (\w+ x \w+), (C=.*)", name)
    return name if match is None else f"{match[2]} + {match[1]} {match[3]}"


def _is_shown(cell: Result, size: str) -> bool:
    return cell["size"] == size and not cell["checkpointing"] and "seconds" in cell


def _place_of_sizes(sizes: Result) -> str:
    first = sizes["results"][0]
    place = f"{sizes['device']}, rank 3 of 8 without its peers, bf16, batch {first['rows']} x {first['sequence']}"
    return f"{place}; PyTorch {sizes['provenance']['versions']['torch']}, commit {sizes['provenance']['commit'][:7]}"


def compare_all(result: Result) -> str:
    """All contestants, with model state, collectives and process groups."""
    contestants = result["contestants"]
    rows = []
    for name, figures_of in contestants.items():
        state = max(rank["weights"] + rank["gradients"] + rank["optimizer"] for rank in figures_of["ranks"])
        cells = [f"{state / MIB:.1f}", f"{most(contestants, name, 'peak') / MIB:.1f}"]
        cells.append(f"{most(contestants, name, 'sent') / 1e6:.1f}")
        cells += [f"{most(contestants, name, kind):.0f}" for kind in ("collectives", "process_groups")]
        rows.append([label(name), *cells, spread(ratio_of_steps(contestants, name, "DDP"))])
    return table(["", "state, MiB", "peak, MiB", "sent, MB", "collectives", "groups", "step / DDP's"], rows)


def time_to_loss(*results: Result) -> str:
    """Time to ZeRO-1's final loss, mean of the seeds; "-" if it is not reached.

    Args:
        results: of each link. Losses after a step are those of the first, in which no run ends early, and peaks those
            of the last, whose runs are shown.
    """
    first, *_ = everyone = [{(row["name"], row["seed"]): row for row in result["results"]} for result in results]
    seeds = sorted({seed for _, seed in first})
    goals = [first["ZeRO-1", seed]["curve"][-1][2] + LOSS_TOLERANCE for seed in seeds]
    rows = []
    for name in dict.fromkeys(name for name, seed in first if (name, seed) in everyone[-1]):
        runs = [first[name, seed] for seed in seeds]
        steps = [_reached(run["curve"], goal, axis=0) for run, goal in zip(runs, goals, strict=True)]
        cells = [f"{statistics.mean(run['curve'][-1][2] for run in runs):.3f} ({runs[0]['steps']})"]
        cells.append(f"{max(max(everyone[-1][name, seed]['peak']) for seed in seeds) / MIB:.1f}")
        cells.append(f"{max(max(run['link_bytes']) / run['curve'][-1][0] for run in runs) / 1e6:.2f}")
        for runs_of in everyone:
            there = [runs_of.get((name, seed)) for seed in seeds]
            cells.append(_seconds(list(zip(there, goals, steps, strict=True))))
        rows.append([name, *cells])
    size = results[0]["model"]["num_parameters"] / 1e6
    caption = f"{results[0]['ranks']} ranks on {results[0]['nodes']} nodes, {size:.2f}M parameters, seeds "
    caption += f"{', '.join(map(str, seeds))}; {_commit(*results)}; load before a run at most "
    caption += " / ".join(f"{max(row['load'] for row in result['results']):.1f}" for result in results)
    heads = ["final loss (steps)", "peak, MiB", "over the link, MB per step"]
    return f"{caption}:\n\n" + table(["", *heads, *(f"{result['link']}, s" for result in results)], rows)


def lost_team(reference: Result, *results: Result) -> str:
    """Time to ZeRO-1's final loss if a team is killed after a third of the steps, beside the undisturbed run.

    Args:
        reference: of `time_to_loss`, which has ZeRO-1's run on the same data.
        results: of each link.
    """
    of_zero = {row["seed"]: row["curve"][-1][2] for row in reference["results"] if row["name"] == "ZeRO-1"}
    everyone = [{row["name"]: row for row in result["results"]} for result in results]
    rows = []
    for name, first in everyone[0].items():
        goal = of_zero[first["seed"]] + LOSS_TOLERANCE
        cells = [f"{first['curve'][-1][2]:.3f}"]
        for runs in everyone:
            seconds, undisturbed = (
                _reached(runs[run]["curve"], goal, axis=1) for run in (name, name.partition(";")[0])
            )
            ratio = f" ({seconds / undisturbed:.2f}x)" if seconds and undisturbed and ";" in name else ""
            cells += ["-" if seconds is None else f"{seconds:.0f}{ratio}", f"{runs[name]['longest_step'][0]:.1f}"]
        rows.append([name.partition(", ")[2], *cells])
    heads = [name.partition(", ")[0], f"final loss ({first['steps']})"]
    heads += [head for result in results for head in (f"{result['link']}: s", "longest step, s")]
    caption = f"{results[0]['nodes']} teams of one rank; {_commit(*results)}; load before a run at most "
    caption += " / ".join(f"{max(row['load'] for row in result['results']):.1f}" for result in results)
    return f"{caption}:\n\n" + table(heads, rows)


def _seconds(runs: Sequence[tuple[Result | None, float, float | None]]) -> str:
    """Mean seconds to a loss, and the share of synchronizations in the time of training.

    Args:
        runs: of each seed, with the loss, and the steps to it: a run that ended early is continued ("~") with its mean
            seconds per step.
    """
    times, shares, is_continued = [], [], False
    for run, loss, steps in runs:
        if run is None or steps is None:
            return "" if run is None else "-"
        time = _reached(run["curve"], loss, axis=1)
        last_step, total, _ = run["curve"][-1]
        if time is None and last_step < run["steps"]:
            time, is_continued = steps * total / last_step, True
        if time is None:
            return "-"
        times.append(time)
        shares.append(max(run["seconds_synchronizing"]) / total)
    share = f" ({statistics.mean(shares):.0%})" if any(shares) else ""
    return f"{'~' if is_continued else ''}{statistics.mean(times):.0f}{share}"


def _reached(curve: Sequence[Sequence[float]], loss: float, *, axis: int) -> float | None:
    """Steps (axis 0) or seconds (1) until a loss, interpolated linearly between two evaluations."""
    for before, after in itertools.pairwise(curve):
        if after[2] <= loss:
            share = (before[2] - loss) / (before[2] - after[2]) if before[2] > after[2] else 1.0
            return before[axis] + max(0.0, share) * (after[axis] - before[axis])
    return None


def quality(labels: Mapping[str, str], from_budget: int, result: Result, costs: Result) -> str:
    heads, rows = quality_rows(Figures.of(result, "text"), costs["subjects"], labels, from_budget)
    text = "Final loss, nats per byte (minus the first row; ± standard error, where there are several seeds):"
    return f"{text}\n\n{table(['', *heads], rows)}"


def many_passes(result: Result) -> str:
    heads, rows = many_passes_rows({depth: Figures.of(result, f"many passes, {depth} layers") for depth in (8, 16)})
    return "Final loss, nats per byte (in parentheses the lowest):\n\n" + table(["", *heads], rows)


def images(result: Result) -> str:
    heads, rows = image_rows(result["cells"])
    if not rows:
        return "*Not measured yet: so far learning rates are being chosen.*"
    seeds = "± standard error of seeds"
    return f"Test loss, nats, {seeds} (minus the first row); test error:\n\n" + table(["", *heads], rows)


def checkpoints(result: Result) -> str:
    """A sentence: medians over repeats of ratios to ZeRO-1, and seconds."""
    name, base = SDP, result["seconds"][result["baseline"]]
    times = result["seconds"][name]
    save, load = (
        statistics.median(a / b for a, b in zip(times[what], base[what], strict=True))
        for what in ("save and sync", "load")
    )
    blocks, until = (statistics.median(times[what]) for what in ("asynchronous save blocks", "until it is on disk"))
    text = f"{label(name)}: a save until it is on disk takes {save:.2f} of {result['baseline']}'s time, a load "
    text += f"{load:.2f}; an asynchronous save blocks for {blocks:.2f} s of {until:.2f} s "
    text += f"({result['ranks']} ranks, {result['bytes'][name] / 1e6:.0f} MB, {result['arguments']['precision']}; "
    return f"{text}{_commit(result)})."


def host_time(result: Result) -> str:
    """Table of host times of one thread."""
    rows = []
    for row in result["results"]:
        parts = [f"{1e3 * statistics.median(row[part]):.1f}" for part in ("pass", "step")]
        name = f"{label(re.sub(r' k=[0-9]+', '', row['name']))}"
        facts = [str(row["ranks"]), str(row.get("subnetworks", "")), *parts]
        rows.append([name, *facts, f"{row['collectives']}", f"{row['process_groups']}"])
    heads = ["", "ranks", "subnetworks", "forward and backward, ms", "step, ms", "collectives", "groups"]
    return f"{result['model']['num_hidden_layers']} layers; {_commit(result)}:\n\n" + table(heads, rows)


def meeting(result: Result) -> str:
    """A sentence: host time of a meeting and what it sends, by coverage, of the fewest and the most teams."""
    parts = []
    for coverage in dict.fromkeys(row["coverage"] for row in result["results"]):
        rows = [row for row in result["results"] if row["coverage"] == coverage]
        seconds = " and ".join(f"{statistics.median(row['seconds']):.1f}" for row in rows)
        sent = " and ".join(f"{row['sent'] / 1e6:.0f}" for row in rows)
        parts.append(f"{seconds} s and {sent} MB at C = {Fraction(coverage)}")
    teams = " and ".join(dict.fromkeys(str(row["teams"]) for row in result["results"]))
    size = result["results"][0]["parameters"] / 1e9
    text = (
        f"A meeting of {teams} teams of {result['ranks']} ranks that train {size:.1f}B parameters in fp32 costs a rank "
    )
    return f"{text}{'; '.join(parts)} ({_commit(result)})."


def gpu(sizes: Result) -> str:
    """Step and peak of one rank of eight, without activation checkpointing."""
    models = list(dict.fromkeys(cell["size"] for cell in sizes["results"]))
    rows = []
    for name in dict.fromkeys(cell["name"] for cell in sizes["results"]):
        rows.append([label(_as_in_compare(name))])
        for size in models:
            cell = next((cell for cell in sizes["results"] if cell["name"] == name and _is_shown(cell, size)), None)
            rows[-1] += ["", ""] if cell is None else [f"{1e3 * cell['median']:.0f}", _gib(cell["peak"])]
    heads = ["", *(head for size in models for head in (f"{size}: step, ms", "peak, GiB"))]
    return f"{_place_of_sizes(sizes)}:\n\n{table(heads, rows)}"


def families(result: Result) -> str:
    """Verdicts of each mapping."""
    caption = f"Transformers {result['provenance']['versions']['transformers']}"
    caption += f", timm {result['timm']}" if "timm" in result else ""
    heads, rows = families_table.counts(result["models"])
    return f"{caption}; {_commit(result)}:\n\n{table(heads, rows)}"


def families_reasons(result: Result) -> str:
    """What is not right, and why."""
    reasons = families_table.reasons(result["models"])
    return table(["", "why", "models"], [[word, why, f"{number}: {names}"] for word, why, number, names in reasons])


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f}"


def spread(values: Sequence[float]) -> str:
    """The median, and the quartiles in parentheses."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _place(result: Result) -> str:
    size = result["model"]["num_parameters"] / 1e6
    return f"{result['ranks']} {result['device']} ranks, {size:.1f}M parameters, {result['arguments']['precision']}"


def _commit(*results: Result) -> str:
    """The processor of the first, and the commits of all, whose rows may have some of their own."""
    provenance = results[0]["provenance"]
    rows = [row for result in results for row in result.get("results", ()) if "provenance" in row] or results
    commits = dict.fromkeys(str(row["provenance"]["commit"])[:7] for row in rows)
    return f"{provenance['cores']} cores of {provenance['processor']}, commit {', '.join(commits)}"


TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "compare": (compare, ("compare_4_ranks", "gpu_sizes")),
    "compare-all": (compare_all, ("compare_4_ranks",)),
    "time-to-loss": (time_to_loss, ("time_to_loss_1gbit", "time_to_loss_100mbit", "time_to_loss_20mbit")),
    "lost-team": (lost_team, ("time_to_loss_1gbit", "lost_team_20mbit")),
    "meeting": (meeting, ("meeting_time",)),
    "quality": (partial(quality, {name: LABELS[name] for name in IN_RESULTS}, 500), ("learning", "recipe_costs")),
    "quality-readme": (
        partial(quality, {name: LABELS[name] for name in IN_README}, 1000),
        ("learning", "recipe_costs"),
    ),
    "quality-all": (partial(quality, LABELS, 250), ("learning", "recipe_costs")),
    "quality-narrow": (partial(quality, NARROW, 250), ("learning", "recipe_costs")),
    "many-passes": (many_passes, ("learning",)),
    "images": (images, ("images",)),
    "checkpoints": (checkpoints, ("checkpoints_4_ranks",)),
    "host-time": (host_time, ("host_time",)),
    "families": (families, ("families",)),
    "families-reasons": (families_reasons, ("families",)),
    "gpu": (gpu, ("gpu_sizes",)),
}


if __name__ == "__main__":
    main()
