"""Tables of both studies: losses of the dense model at equal FLOPs, compared with data parallelism."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.common.cells import TUNING_SEED
from benchmarks.images.subjects import SUBJECTS as IMAGE_SUBJECTS

Cell = Mapping[str, Any]
BySeed = dict[tuple[str, tuple[int, ...]], dict[int, Cell]]
IMAGE_BASE = "18 blocks"
# Subjects of the table in docs/results.md. Those of SDP hold the first and the last layer on all ranks, multiply what
# branches add by 1 / C and start with smaller output projections, unless a label says otherwise. The first is the base
# of differences.
LABELS = {
    "dense 64x8": "data parallelism",
    "dense 64x8, 2 rows": "data parallelism, half the rows, twice the steps",
    "dense 64x4": "data parallelism, half the depth",
    "C=3/4, scaled": "SDP, C = 3/4",
    "C=1/2, whole ends, scaled in training": "SDP, C = 1/2",
    "C=1/2, no whole ends, scaled": "SDP, C = 1/2, no whole ends",
    "C=1/2, neurons, scaled": "SDP, C = 1/2, neurons, no whole ends",
    "C=1/4, whole ends, scaled in training": "SDP, C = 1/4",
    "C=1/4, whole ends": "SDP, C = 1/4, unscaled",
}
MANY_PASSES = {
    "data parallelism": "dense 32x{full}",
    "stochastic depth 0.2": "32x{full}, stochastic depth 0.2",
    "half the depth": "dense 32x{half}",
    "half the depth, dropout 0.1": "32x{half}, dropout 0.1",
    "C = 1/2, re-drawn": "32x{full}, C=1/2, re-drawn every 20 steps",
    "C by depth, re-drawn": "32x{full}, C by depth, re-drawn every 20 steps",
}
IN_README = (
    "dense 64x8",
    "dense 64x4",
    "C=1/2, whole ends, scaled in training",
    "C=1/4, whole ends, scaled in training",
)


def tuned_rate(cells: Sequence[Mapping[str, Any]], study: str, subject: str, budget: int) -> float | None:
    """The best of the runs with the tuning seed, of this budget if there are some, else of the largest; None without
    such runs."""
    key = (study, subject, TUNING_SEED)
    tried = [cell for cell in cells if (cell["study"], cell["subject"], cell["seed"]) == key]
    budgets = {cell["budget"] for cell in tried}
    chosen = budget if budget in budgets else max(budgets, default=None)
    last = [cell for cell in tried if cell["budget"] == chosen and math.isfinite(cell["loss"])]
    best = min(last, key=lambda cell: cell["loss"], default=None)
    return None if best is None else float(best["rate"])


def at_one_rate(cells: Sequence[Cell], study: str) -> list[Cell]:
    """Cells of one study without those of the tuning seed, each subject at one learning rate: the tuned one, or else
    that with the most seeds, of these the best."""
    groups: dict[tuple[str, int], dict[float, list[Cell]]] = {}
    for cell in cells:
        if cell["study"] == study and cell["seed"] != TUNING_SEED:
            groups.setdefault((cell["subject"], cell["budget"]), {}).setdefault(cell["rate"], []).append(cell)
    found: list[Cell] = []
    for (subject, budget), by_rate in groups.items():
        most = max(by_rate.values(), key=lambda own: (len(own), -statistics.mean(cell["loss"] for cell in own)))
        found += by_rate.get(tuned_rate(cells, study, subject, budget) or 0.0, most)
    return found


def quality_rows(
    cells: Iterable[Cell], costs: Mapping[str, Mapping[str, float]], subjects: Iterable[str], from_budget: int
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: for each budget the final loss, in parentheses minus that of the first row; then peak memory, and
    all that is sent at the largest budget, relative to the first row.

    Args:
        costs: of each subject.
        subjects: of `LABELS`, the base first.
        from_budget: the shortest that is shown.
    """
    base, *_ = subjects = list(subjects)
    found = _by_seed(cells, "budget")
    budgets = sorted({budget for subject, budget in found if subject in subjects and budget >= (from_budget,)})
    rows = []
    for subject in subjects:
        losses = []
        for budget in budgets:
            own, other = found.get((subject, budget), {}), found.get((base, budget), {})
            gaps = [own[seed]["loss"] - other[seed]["loss"] for seed in own.keys() & other.keys()]
            values = [cell["loss"] for cell in own.values()]
            if gaps and subject != base:
                losses.append(f"{statistics.mean(values):.3f} ({mean_and_error(gaps, '+.3f')})")
            else:
                losses.append(mean_and_error(values))
        peak = costs[subject]["peak"] / costs[base]["peak"]
        sent = _sent(found, costs, subject) / _sent(found, costs, base)
        rows.append([LABELS[subject], *losses, f"{peak:.2f}", f"{sent:.2f}"])
    return [*(f"{budget:,} steps" for (budget,) in budgets), "peak", "sent"], rows


def _sent(found: BySeed, costs: Mapping[str, Mapping[str, float]], subject: str) -> float:
    """Bytes of a rank for each FLOP of the largest budget."""
    budget = max(budget for name, budget in found if name == subject)
    cell = next(iter(found[subject, budget].values()))
    return float(costs[subject]["sent"] * cell["steps"] / cell["budget"])


def image_rows(cells: Iterable[Cell]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: test loss, minus that of data parallelism with all blocks for the same seeds, and error; then
    peak memory and all that is sent, relative to the same.

    Args:
        cells: without those that only chose learning rates, if there are any.
    """
    shown = [cell for cell in cells if cell["seed"] != TUNING_SEED and not cell["diverged"]]
    found = _by_seed(shown, "images", "epochs")
    budgets = sorted({budget for _, budget in found})
    rows = []
    for subject in (subject for subject in IMAGE_SUBJECTS if any(name == subject for name, _ in found)):
        results, costs = [], ["", ""]
        for budget in budgets:
            own, other = found.get((subject, budget), {}), found.get((IMAGE_BASE, budget), {})
            last = {seed: cell["curve"][-1] for seed, cell in own.items()}
            before = {seed: cell["curve"][-1]["test_loss"] for seed, cell in other.items()}
            gaps = [last[seed]["test_loss"] - before[seed] for seed in last.keys() & before.keys()]
            losses, errors = ([point[name] for point in last.values()] for name in ("test_loss", "test_error"))
            loss = mean_and_error(losses) if subject == IMAGE_BASE or not gaps else f"{statistics.mean(losses):.3f}"
            gap = f" ({mean_and_error(gaps, '+.3f')})" if gaps and subject != IMAGE_BASE else ""
            results.append(f"{loss}{gap}; {statistics.mean(errors):.1%}" if own else "")
            if own and other and not any(costs):
                one, base = next(iter(own.values())), next(iter(other.values()))
                sent = one["costs"]["sent"] * one["steps"] / (base["costs"]["sent"] * base["steps"])
                costs = [f"{one['costs']['peak'] / base['costs']['peak']:.2f}", f"{sent:.2f}"]
        rows.append([subject, *results, *costs])
    size = budgets[0][0]  # which the text names
    heads = [f"{epochs} epochs" if images == size else f"{images:,} images, {epochs}" for images, epochs in budgets]
    return [*heads, "peak", "sent"], rows


def _by_seed(cells: Iterable[Cell], *budget: str) -> BySeed:
    """Cells by subject and budget, and by seed."""
    found: BySeed = {}
    for cell in cells:
        found.setdefault((cell["subject"], tuple(cell[name] for name in budget)), {})[cell["seed"]] = cell
    return found


def many_passes_rows(cells: Mapping[int, Sequence[Cell]]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: for each depth and number of passes the final loss.

    Args:
        cells: by depth.
    """
    found = {depth: _by_seed(own, "budget") for depth, own in cells.items()}
    budgets = [(depth, budget) for depth, own in found.items() for budget in sorted({budget for _, budget in own})]
    rows = []
    for label, name in MANY_PASSES.items():
        losses = []
        for depth, budget in budgets:
            own = found[depth].get((name.format(full=depth, half=depth // 2), budget), {}).values()
            losses.append(mean_and_error(cell["loss"] for cell in own))
        rows.append([label, *losses])
    return [f"{depth} layers, {_passes(cells[depth], budget)}" for depth, budget in budgets], rows


def _passes(cells: Iterable[Cell], budget: tuple[int, ...]) -> int:
    """Of data parallelism over the text."""
    settings = next(cell for cell in cells if (cell["budget"],) == budget)["settings"]
    tokens = settings["num_workers"] * settings["rows"] * settings["reference"]["length"]
    return round(budget[0] * tokens / settings["train_bytes"])


def mean_and_error(values: Iterable[float], form: str = ".3f") -> str:
    """With the standard error where there are several values."""
    found = list(values)
    if not found:
        return ""
    mean = f"{statistics.mean(found):{form}}"
    if len(found) == 1:
        return mean
    return f"{mean}±{statistics.stdev(found) / math.sqrt(len(found)):{form.lstrip('+')}}"
