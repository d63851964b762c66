"""How many bytes are weights, gradients and optimizer state on each rank, beside ZeRO's and beside the formulas?

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/model_state.py --output benchmarks/results/model_state_4.json

Every contestant trains two steps; the second is measured with a tracker of live tensors. No time is taken here. The
formulas are those of `sdp estimate`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import PRECISIONS, STAGES, Contestant, bytes_of, engine_of, everybody, train
from benchmarks.common.measured_step import measured_step
from benchmarks.common.models import SEQUENCE_LENGTH, SMALL
from benchmarks.common.ranks import gather, option_parser, run, show
from sdp_deepspeed.estimate.formulas import bytes_per_parameter
from sdp_deepspeed.plan.plan import Plan

BUCKET_ELEMENTS = 2_000_000  # at the default of 5e8, stock ZeRO allocates buffers that dwarf this model
KINDS = ("weights", "gradients", "optimizer")


def measure_one(contestant: Contestant, precision: str) -> dict[str, Any]:
    """One contestant: the figures of every rank, and the formulas' figure for their mean; a collective."""
    batch = torch.randint(0, SMALL["vocab_size"], (1, SEQUENCE_LENGTH))
    with engine_of(SMALL, contestant.config(precision, bucket=BUCKET_ELEMENTS)) as engine:
        num_shared, num_maskable = count(engine)
        train(engine, batch)
        with measured_step(engine) as figures:
            train(engine, batch)
    return {
        "name": contestant.name,
        "precision": precision,
        "num_shared": num_shared,
        "num_maskable": num_maskable,
        "expected": expected_bytes(contestant, precision, num_shared, num_maskable),
        "ranks": gather(asdict(figures)),
    }


def count(engine: Any) -> tuple[int, int]:
    """Elements of parameters that are shared, and elements in units; without a plan everybody holds everything."""
    plan: Plan | None = getattr(engine, "plan", None)
    shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in engine.module.named_parameters()}
    if plan is not None:
        with engine.dense():
            shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    pieces = [piece for unit in plan.units for piece in unit.pieces if piece.kind == "parameter"] if plan else []
    maskable = sum(piece.num_elements(shapes[piece.parameter]) for piece in pieces)
    return sum(math.prod(shape) for shape in shapes.values()) - maskable, maskable


def expected_bytes(contestant: Contestant, precision: str, num_shared: int, num_maskable: int) -> dict[str, float]:
    """The formulas' bytes for units, and their plain row (C = 1) for what is shared."""
    num_ranks, row = dist.get_world_size(), STAGES[contestant.stage]  # at C = 1 they are those of plain ZeRO
    regime = contestant.mode.regime if contestant.mode else "forward"
    units = bytes_per_parameter(num_ranks, contestant.coverage, bytes_of(precision), regime=regime)[row]
    shared = bytes_per_parameter(num_ranks, 1.0, bytes_of(precision))[row]
    return {k: num_maskable * u + num_shared * s for k, u, s in zip(KINDS, units, shared, strict=True)}


def largest_deviation(row: dict[str, Any]) -> float:
    """Of the mean over ranks from the formulas' figure, as a share of it."""
    means = {kind: sum(rank[kind] for rank in row["ranks"]) / len(row["ranks"]) for kind in KINDS}
    return max(abs(means[kind] / row["expected"][kind] - 1) for kind in KINDS)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results = []
    for precision, contestant in itertools.product(arguments.precisions, everybody(arguments.coverage)):
        if contestant.runs_in(precision):
            row = measure_one(contestant, precision)
            show(f"{precision} {contestant.name}: {100 * largest_deviation(row):.1f}% off the formulas")
            results.append(row)
    facts = {"num_ranks": dist.get_world_size(), "model": SMALL, "arguments": vars(arguments)}
    return {"what": "model_state", **facts, "results": results}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    run(parser, measure)


if __name__ == "__main__":
    main()
