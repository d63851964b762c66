"""Forecast: time to a loss over slow links, with data parallelism, SDP, and either with local steps.

    python benchmarks/local_steps_forecast.py --output benchmarks/results/local_steps_forecast.json

Loss by steps is that of the learning study (0.41M parameters, eight workers): the lowest at that time of any of its
runs, interpolated over the logarithm of the steps. Two clocks, on eight nodes of one rank: the study's model, and a
Llama of 134M parameters, which is assumed to need as many steps. A step takes the measured seconds of a dense step's
compute, times its share of the FLOPs, plus the seconds for its bytes on the link of a node, without overlap. Bytes are
those of `sdp estimate`, with local steps the mean over the steps of a run; plain ZeRO-1's, 1.5 times those of SDP at
C = 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.models import LLAMAS, Shape
from benchmarks.common.provenance import write_result
from benchmarks.learning.plans import build
from benchmarks.learning.subjects import REFERENCE, SUBJECTS, Subject
from benchmarks.quality import TUNING_SEED
from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.forecast import forecast

RESULTS = Path(__file__).parent / "results"
LINKS = {"100 Mb/s": 1e8, "20 Mb/s": 2e7}
NUM_NODES = 8
BUDGETS = (500, 1000, 2000)  # steps of ZeRO-1, whose loss and time the others are compared with
DENSE = "dense 64x8"
LABELS = {  # without local steps
    DENSE: "data parallelism, least bytes",
    "dense 64x4": "the same, half the depth",
    "C=1/2, whole ends, scaled in training": "SDP, C = 1/2",
    "C=1/4, whole ends, scaled in training": "SDP, C = 1/4",
}

Curve = Sequence[tuple[int, float]]  # steps and loss


@dataclass(frozen=True)
class Clock:
    """A model on `NUM_NODES` nodes of one rank.

    Args:
        length: tokens of a row.
        seconds: of the compute of a dense step.
        precision: keys of a DeepSpeed config.
    """

    shape: Shape
    length: int
    seconds: float
    precision: Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    cells = [cell for name in ("learning", "local_steps") for cell in _read(name)["cells"] if _is_counted(cell)]
    clocks = {"0.41M": _clock_of_study(cells), "134M": _clock_of_gpu()}
    local = {name: name.replace("=", " = ") for name, subject in SUBJECTS.items() if subject.local_steps}
    rows = [_row("ZeRO-1", DENSE, 1.5, cells, clocks)]
    for name, label in (LABELS | local).items():
        if points_of(cells, name):
            rows.append(_row(label, name, 1.0, cells, clocks))
    targets = {f"ZeRO-1, {steps:,} steps": loss for steps, loss in rows[0]["runs"] if steps in BUDGETS}
    targets |= {row["label"]: row["runs"][-1][1] for row in rows if row["label"] in local.values()}
    for row in rows:
        row["steps to"] = {name: steps_to(row["curve"], loss) for name, loss in targets.items()}
    facts = {name: {"seconds": clock.seconds, "shape": dict(clock.shape)} for name, clock in clocks.items()}
    write_result(
        options.output,
        {"what": "local_steps_forecast", "targets": targets, "links": LINKS, "clocks": facts, "rows": rows},
    )


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def _is_counted(cell: Mapping[str, Any]) -> bool:
    return cell["study"] == "text" and cell["seed"] != TUNING_SEED and cell["rate"] == 0.006


def _clock_of_study(cells: Iterable[Mapping[str, Any]]) -> Clock:
    """One core for each worker: the seconds of all of them in a process of one thread, over their number."""
    seconds = [c["cpu_seconds"] / c["steps"] / NUM_NODES for c in cells if c["subject"] == DENSE]
    model: Any = build(REFERENCE, 0)
    return Clock(model.config.to_dict(), REFERENCE.length, statistics.median(seconds), {})


def _clock_of_gpu() -> Clock:
    """One micro-batch of 4 x 2048 tokens on an H200."""
    name = "SDP + ZeRO-1, forward x block, C=1"
    steps = [c for c in _read("gpu_sizes")["results"] if (c["size"], c["name"]) == ("134M", name)]
    seconds = next(cell["median"] for cell in steps if not cell["checkpointing"])
    return Clock({"model_type": "llama", **LLAMAS["134M"]}, 2048, seconds, {"bf16": {"enabled": True}})


def _row(
    label: str, name: str, passes: float, cells: Iterable[Mapping[str, Any]], clocks: Mapping[str, Clock]
) -> dict[str, Any]:
    runs = [(steps, loss) for steps, loss, is_last in points_of(cells, name) if is_last]
    curve = envelope(points_of(cells, name))
    costs = {size: step_of(clock, SUBJECTS[name], passes) for size, clock in clocks.items()}
    return {"label": label, "subject": name, "runs": runs, "curve": curve, "step": costs}


def points_of(cells: Iterable[Mapping[str, Any]], subject: str) -> list[tuple[int, float, bool]]:
    """Steps, loss (mean of the seeds) of each point of a subject's runs, and whether it is the last of its run."""
    losses = defaultdict(list)
    for cell in cells:
        if cell["subject"] == subject:
            for point in cell["curve"]:
                losses[point["step"], cell["steps"]].append(point["loss"])
    return [(step, statistics.mean(losses[step, last]), step == last) for step, last in sorted(losses)]


def envelope(points: Iterable[tuple[int, float, bool]]) -> Curve:
    """Those points of all runs that are lower than all points with fewer steps."""
    curve: list[tuple[int, float]] = []
    for steps, loss, _ in points:
        if not curve or loss < curve[-1][1]:
            curve.append((steps, loss))
    return curve


def step_of(clock: Clock, subject: Subject, passes: float) -> dict[str, Any]:
    """Bytes that a rank sends in a step, mean over the steps, and the seconds of a step by link.

    Args:
        passes: bytes over those of SDP.
    """
    depth = clock.shape["num_hidden_layers"]
    sent, flops = _estimate(clock, depth * subject.size.depth // REFERENCE.depth, subject.block or {"coverage": 1.0})
    _, dense = _estimate(clock, depth, {"coverage": 1.0})
    sent *= passes
    if subject.local_steps is not None:
        synchronous = subject.synchronous_first + subject.synchronous_last
        sent *= synchronous + (1 - synchronous) / subject.local_steps.every
    seconds = {link: clock.seconds * flops / dense + 8 * sent / rate for link, rate in LINKS.items()}
    return {"sent": sent, "seconds": seconds}


def _estimate(clock: Clock, depth: int, block: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes sent and FLOPs of a rank and step, without local steps, with so many layers."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        KEY: dict(block),
        **clock.precision,
    }
    found = forecast(
        {**clock.shape, "num_hidden_layers": depth}, config, num_ranks=NUM_NODES, sequence_length=clock.length
    )
    return float(found.rank.sent), float(found.flops)


def steps_to(curve: Curve, loss: float) -> float | None:
    """Steps to a loss, interpolated over their logarithm; None if no point is as low."""
    for (before, higher), (after, lower) in pairwise(curve):
        if lower <= loss <= higher:
            return exp(log(before) + (higher - loss) / (higher - lower) * log(after / before))
    return None


if __name__ == "__main__":
    main()
