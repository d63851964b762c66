"""Make the tables of docs/results.md and the figure and tables of the README from raw figures in benchmarks/results.

    python benchmarks/tables.py           # writes README.md, docs/results.md and docs/figure.svg
    python benchmarks/tables.py --check   # only check whether they are current

Tables, and the figure's bars, are between `<!-- name -->` and `<!-- /name -->`.
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
from benchmarks.quality import IN_README, LABELS, at_one_rate, image_rows, many_passes_rows, quality_rows

ROOT = Path(__file__).parents[1]
SDP = "forward x block + ZeRO-1 C=0.5"
MIB = 2**20
LOSS_TOLERANCE = 0.01  # nats; equal algorithms differ by less after hundreds of steps
Result = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is not current")
    options = parser.parse_args()
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
    cells = sorted((folder / "images").glob("*.json"))
    return results | {"images": {"cells": [json.loads(path.read_text(encoding="utf-8")) for path in cells]}}


def outputs(root: Path) -> dict[Path, str]:
    """Expected content of each file."""
    results = results_of(root)
    paths = (root / "README.md", root / "docs/results.md", root / "docs/figure.svg")
    return {path: filled(path.read_text(encoding="utf-8"), results) for path in paths}


def filled(document: str, results: Mapping[str, Result]) -> str:
    """`document`, with each table made from the raw figures."""

    def fill(match: re.Match[str]) -> str:
        make, files = TABLES[match[1]]
        return f"<!-- {match[1]} -->\n{make(*(results[file] for file in files))}\n<!-- /{match[1]} -->"

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", fill, document, flags=re.DOTALL)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown table with right-aligned numbers."""
    first, *others = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([first, "|---" + "|---:" * (len(heads) - 1) + "|", *others])


def label(name: str) -> str:
    """A contestant's name for readers, such as "SDP block C = 1/2, ZeRO-1"."""
    match = re.fullmatch(r"(\w+) x (\w+) \+ (.*) C=([\d.]+)", name)
    if match is None:
        return name.replace("DDP, activation checkpointing", "DDP, checkpointing")
    regime, strategy, host, coverage = match.groups()
    mode = strategy if regime == "forward" else f"{regime} {strategy}"
    return f"SDP {mode} C = {Fraction(coverage)}, {host}"


def bars(result: Result) -> str:
    """SVG: peak memory, step time and bytes sent, relative to data parallelism."""
    contestants, lines = result["contestants"], []
    for column, name in enumerate(("DDP", "ZeRO-1", SDP)):
        ratios = {
            "memory": most(contestants, name, "peak") / most(contestants, "DDP", "peak"),
            "time": statistics.median(ratio_of_steps(contestants, name)),
            "bytes": most(contestants, name, "sent") / most(contestants, "DDP", "sent"),
        }
        for row, (kind, ratio) in enumerate(ratios.items()):
            left, top, width = 126 + 272 * column, 308 + 24 * row, 110 * ratio
            lines.append(f'  <rect x="{left}" y="{top}" width="{width:.1f}" height="15" rx="3" class="{kind}"/>')
            lines.append(f'  <text x="{left + width + 6:.1f}" y="{top + 12}">{ratio:.2f}x</text>')
    source = f"Bars: measured on {_place(result)}, relative to data parallelism (docs/results.md). "
    source += "The exported model is dense."
    return "\n".join([*lines, f'  <text x="470" y="432" class="muted source middle">{source}</text>'])


def ratio_of_steps(contestants: Mapping[str, Any], name: str) -> list[float]:
    """Time by DDP's, per repeat."""
    seconds, base = (contestants[each]["seconds"] for each in (name, "DDP"))
    return [value / other for value, other in zip(seconds, base, strict=True)]


def most(contestants: Mapping[str, Any], name: str, kind: str) -> float:
    """Of the rank with the most."""
    return max(float(rank[kind]) for rank in contestants[name]["ranks"])


def compare(result: Result, sizes: Result) -> str:
    """The contestants by which a user decides, on CPU ranks and with 1B parameters on a GPU."""
    contestants = result["contestants"]
    on_gpu = {cell["name"]: cell for cell in sizes["results"]}
    rows = []
    for name in contestants:
        peak, sent = most(contestants, name, "peak") / MIB, most(contestants, name, "sent") / 1e6
        cells = [f"{peak:.1f}", f"{sent:.1f}", spread(ratio_of_steps(contestants, name)), "", ""]
        if name in on_gpu:
            cells[-2:] = [f"{on_gpu[name]['peak'] / 2**30:.1f}", f"{1e3 * on_gpu[name]['median']:.0f}"]
        rows.append([label(name), *cells])
    milliseconds = 1e3 * statistics.median(contestants["DDP"]["seconds"])
    caption = f"{_place(result)}, batch {result['rows']} x {result['length']} per rank; "
    caption += f"{result['repeats']} repeats, DDP's step takes {milliseconds:.0f} ms; "
    caption += f"load before the run {result['load']:.1f}; {_commit(result)}. "
    caption += f"{sizes['device']}, rank 3 of 8 without its peers, bf16, batch {sizes['rows']} x {sizes['sequence']}; "
    provenance = sizes["provenance"]
    caption += f"PyTorch {provenance['versions']['torch']}, commit {provenance['commit'][:7]}:"
    return f"{caption}\n\n" + table(["", "peak, MiB", "sent, MB", "step / DDP's", "1B: peak, GiB", "step, ms"], rows)


def time_to_loss(*results: Result) -> str:
    """Time to ZeRO-1's final loss; "-" if it is not reached.

    Args:
        results: of each link. Losses after a step are those of the first, in which no run ends early, and peaks those
            of the last, whose runs are shown.
    """
    first, *_ = everyone = [{row["name"]: row for row in result["results"]} for result in results]
    goal = _goal(first)
    rows = []
    for name in (name for name in first if name in everyone[-1]):
        run = first[name]
        steps = _reached(run["curve"], goal, axis=0)
        cells = [f"{run['curve'][-1][2]:.3f} ({run['steps']})", f"{max(everyone[-1][name]['peak']) / MIB:.1f}"]
        cells.append(f"{max(run['link_bytes']) / run['curve'][-1][0] / 1e6:.2f}")
        shown = name.replace("SDP teams + ZeRO-1", "teams").replace("torchft's DiLoCo + FSDP2", "DiLoCo")
        rows.append([shown, *cells, *(_seconds(runs.get(name), goal, steps) for runs in everyone)])
    size = results[0]["model"]["num_parameters"] / 1e6
    caption = f"{results[0]['ranks']} ranks on {results[0]['nodes']} nodes, {size:.2f}M parameters; "
    caption += f"{_commit(*results)}; {_load(*results)}:"
    heads = ["final loss (steps)", "peak, MiB", "over the link, MB per step"]
    return f"{caption}\n\n" + table(["", *heads, *(f"{result['link']}, s" for result in results)], rows)


def lost_team(reference: Result, result: Result) -> str:
    """Time to ZeRO-1's final loss if a team is killed after a third of the steps, beside the undisturbed run.

    Args:
        reference: of `time_to_loss`, which has ZeRO-1's run on the same data.
    """
    runs = {row["name"]: row for row in result["results"]}
    goal = _goal({row["name"]: row for row in reference["results"]})
    seconds = {name: _reached(run["curve"], goal, axis=1) for name, run in runs.items()}
    rows = []
    for name, run in runs.items():
        time, undisturbed = seconds[name], seconds[name.partition(";")[0]]
        assert time is not None, "all runs reach it"
        assert undisturbed is not None, "all runs reach it"
        ratio = f" ({time / undisturbed:.2f}x)" if ";" in name else ""
        cells = [f"{run['curve'][-1][2]:.3f}", f"{time:.0f}{ratio}", f"{run['longest_step'][0]:.1f}"]
        rows.append([name.partition(", ")[2], *cells])
    heads = [name.partition(", ")[0], f"final loss ({run['steps']})", f"{result['link']}: s", "longest step, s"]
    return f"{result['nodes']} teams of one rank; {_commit(result)}; {_load(result)}:\n\n" + table(heads, rows)


def _goal(runs: Mapping[str, Result]) -> float:
    return float(runs["ZeRO-1"]["curve"][-1][2]) + LOSS_TOLERANCE


def _load(*results: Result) -> str:
    loads = (max(row["load"] for row in result["results"]) for result in results)
    return f"load before a run at most {' / '.join(f'{load:.1f}' for load in loads)}"


def _seconds(run: Result | None, loss: float, steps: float | None) -> str:
    """Seconds to a loss, and the share of synchronizations in the time of training.

    Args:
        steps: to the loss: a run that ended early is continued ("~") with its mean seconds per step.
    """
    if run is None or steps is None:
        return "" if run is None else "-"
    time, mark = _reached(run["curve"], loss, axis=1), ""
    last_step, total, _ = run["curve"][-1]
    if time is None and last_step < run["steps"]:
        time, mark = steps * total / last_step, "~"
    share = max(run["seconds_synchronizing"]) / total
    return "-" if time is None else f"{mark}{time:.0f}{f' ({share:.0%})' if share else ''}"


def _reached(curve: Sequence[Sequence[float]], loss: float, *, axis: int) -> float | None:
    """Steps (axis 0) or seconds (1) until a loss, interpolated linearly between two evaluations."""
    for before, after in itertools.pairwise(curve):
        if after[2] <= loss:
            share = (before[2] - loss) / (before[2] - after[2]) if before[2] > after[2] else 1.0
            return before[axis] + max(0.0, share) * (after[axis] - before[axis])
    return None


def quality(subjects: Iterable[str], from_budget: int, result: Result, costs: Result) -> str:
    heads, rows = quality_rows(at_one_rate(result["cells"], "text"), costs["subjects"], subjects, from_budget)
    text = "Final loss, nats per byte (minus the first row; ± standard error, where there are several seeds):"
    return f"{text}\n\n{table(['', *heads], rows)}"


def many_passes(result: Result) -> str:
    heads, rows = many_passes_rows(
        {depth: at_one_rate(result["cells"], f"many passes, {depth} layers") for depth in (8, 16)}
    )
    return "Final loss, nats per byte, by depth and passes:\n\n" + table(["", *heads], rows)


def images(result: Result) -> str:
    heads, rows = image_rows(result["cells"])
    text = "Test loss, nats (minus the first row; ± standard error, where there are several seeds); test error:"
    return f"{text}\n\n" + table(["", *heads], rows)


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
    text += f"({result['ranks']} ranks, {result['bytes'][name] / 1e6:.0f} MB, bf16; "
    return f"{text}{_commit(result)})."


def families(result: Result) -> str:
    """Verdicts of each mapping."""
    caption = f"Transformers {result['provenance']['versions']['transformers']}"
    caption += f", timm {result['timm']}" if "timm" in result else ""
    words, kinds, models = ("right", "partial", "refused", "wrong"), ("blocks", "neurons"), result["models"]
    rows = []
    for mapping in dict.fromkeys(name.partition("/")[0] for name in models):
        found = [model for name, model in models.items() if name.startswith(f"{mapping}/")]
        known = [model for model in found if all(model.get(kind, {}).get("word") in words for kind in kinds)]
        cells = ["/".join(str(sum(model[kind]["word"] == word for model in known)) for word in words) for kind in kinds]
        rows.append([mapping, str(len(found)), str(len(found) - len(known)), *cells])
    heads = ["", "models", "unknown", *(f"{kind}: {'/'.join(words)}" for kind in kinds)]
    return f"{caption}; {_commit(result)}:\n\n{table(heads, rows)}"


def spread(values: Sequence[float]) -> str:
    """The median, and the quartiles in parentheses."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _place(result: Result) -> str:
    size = result["model"]["num_parameters"] / 1e6
    return f"{result['ranks']} {result['device']} ranks, {size:.1f}M parameters, fp32"


def _commit(*results: Result) -> str:
    """The processor of the first, and the commits of all, whose rows may have some of their own."""
    provenance = results[0]["provenance"]
    rows = [row for result in results for row in result.get("results", ()) if "provenance" in row] or results
    commits = dict.fromkeys(str(row["provenance"]["commit"])[:7] for row in rows)
    return f"{provenance['cores']} cores of {provenance['processor']}, commit {', '.join(commits)}"


TABLES: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "bars": (bars, ("compare_4_ranks",)),
    "compare": (compare, ("compare_4_ranks", "gpu_sizes")),
    "time-to-loss": (time_to_loss, ("time_to_loss_1gbit", "time_to_loss_100mbit", "time_to_loss_20mbit")),
    "lost-team": (lost_team, ("time_to_loss_1gbit", "lost_team_20mbit")),
    "quality": (partial(quality, LABELS, 500), ("learning", "recipe_costs")),
    "quality-readme": (partial(quality, IN_README, 1000), ("learning", "recipe_costs")),
    "many-passes": (many_passes, ("learning",)),
    "images": (images, ("images",)),
    "checkpoints": (checkpoints, ("checkpoints_4_ranks",)),
    "families": (families, ("families",)),
}


if __name__ == "__main__":
    main()
