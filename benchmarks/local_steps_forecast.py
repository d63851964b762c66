"""Forecast: time to a loss over slow links, with data parallelism, SDP, and either with local steps.

    python benchmarks/local_steps_forecast.py --output benchmarks/results/local_steps_forecast.json

Loss by steps is that of the learning study (0.41M parameters, eight workers): the final losses of its runs, of which
each has its learning rate decay to zero, interpolated over the logarithm of the steps. Two clocks, on eight nodes of
one rank: the study's model, and a Llama of 134M parameters, which is assumed to need as many steps. A step takes the
measured seconds of a dense step's compute, times its share of the FLOPs, plus the seconds for its bytes on the link of
a node, without overlap. Bytes are those of `sdp estimate`; plain ZeRO-1's, 1.5 times those of SDP at C = 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
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

Curve = Sequence[tuple[int, float]]  # steps and final loss of runs, the shortest first


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
        if curve_of(cells, name):
            rows.append(_row(label, name, 1.0, cells, clocks))
    zero = rows[0]
    targets = {steps: loss for steps, loss in zero["curve"] if steps in BUDGETS}
    for row in rows:
        row["steps to"] = {steps: steps_to(row["curve"], loss) for steps, loss in targets.items()}
        row["loss after"] = {
            f"{size}, {link}": {steps: _loss_in_time_of(zero, steps, row, size, link) for steps in targets}
            for size, link in product(clocks, LINKS)
        }
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
    curve = curve_of(cells, name)
    costs = {size: step_of(clock, SUBJECTS[name], passes) for size, clock in clocks.items()}
    return {"label": label, "subject": name, "curve": curve, "step": costs}


def curve_of(cells: Iterable[Mapping[str, Any]], subject: str) -> Curve:
    """Steps and final loss of a subject's runs, mean of the seeds; the shortest first."""
    losses = defaultdict(list)
    for cell in cells:
        if cell["subject"] == subject:
            losses[cell["steps"]].append(cell["loss"])
    return [(steps, statistics.mean(losses[steps])) for steps in sorted(losses)]


def step_of(clock: Clock, subject: Subject, passes: float) -> dict[str, Any]:
    """Bytes that a rank sends in a step, mean over the steps, and the seconds of a step by link.

    Args:
        passes: bytes over those of SDP.
    """
    depth = clock.shape["num_hidden_layers"]
    sent, flops = _estimate(clock, depth * subject.size.depth // REFERENCE.depth, subject.block or {"coverage": 1.0})
    _, dense = _estimate(clock, depth, {"coverage": 1.0})
    sent *= passes / (subject.local_steps.every if subject.local_steps else 1)
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
    """Steps of a run that ends at a loss; None if no run ended as low."""
    for (before, higher), (after, lower) in pairwise(curve):
        if lower <= loss <= higher:
            return exp(log(before) + (higher - loss) / (higher - lower) * log(after / before))
    return None


def _loss_in_time_of(
    zero: Mapping[str, Any], steps: int, row: Mapping[str, Any], size: str, link: str
) -> tuple[float, bool] | None:
    """Of a row in the time of so many steps of ZeRO-1; see `loss_after`."""
    seconds = [of["step"][size]["seconds"][link] for of in (zero, row)]
    return loss_after(row["curve"], steps * seconds[0] / seconds[1])


def loss_after(curve: Curve, steps: float) -> tuple[float, bool] | None:
    """Final loss of a run of so many steps, and whether a run was as long; if none was, that of the longest. None if no
    run was as short."""
    if steps < curve[0][0]:
        return None
    for (before, higher), (after, lower) in pairwise(curve):
        if steps <= after:
            return higher + (lower - higher) * log(steps / before) / log(after / before), True
    return curve[-1][1], steps == curve[-1][0]


if __name__ == "__main__":
    main()
