"""Bytes of weights, gradients and optimizer state on each rank, measured, beside DESIGN.md's table and beside ZeRO.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/model_state.py --output benchmarks/results/model_state_4.json

Every contestant trains two steps; the second is measured with a tracker of live tensors. No time is taken here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common.contestants import PRECISIONS, STAGES, Contestant, bytes_of, engine_of, everybody, train
from common.provenance import write_result
from step_time import MODEL, SEQUENCE_LENGTH

from sdp_deepspeed.estimate.formulas import bytes_per_parameter
from sdp_deepspeed.measure.step import measured_step
from sdp_deepspeed.plan.plan import Plan

BUCKET_ELEMENTS = 2_000_000  # at the default of 5e8, stock ZeRO allocates buffers that dwarf this model
KINDS = ("weights", "gradients", "optimizer")


def measure(contestant: Contestant, precision: str, coverage: float) -> dict[str, Any]:
    """One contestant: the figures of every rank, and the table's figure for their mean."""
    batch = torch.randint(0, MODEL["vocab_size"], (1, SEQUENCE_LENGTH))
    config = contestant.config(precision, bucket=BUCKET_ELEMENTS, coverage=coverage)
    with engine_of(MODEL, config) as engine:
        counts = count(engine)
        train(engine, batch)
        with measured_step(engine) as figures:
            train(engine, batch)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, asdict(figures))
    return {
        "name": contestant.name,
        "precision": precision,
        "num_shared": counts[0],
        "num_maskable": counts[1],
        "expected": table_bytes(contestant, precision, coverage, *counts),
        "ranks": ranks,
    }


def count(engine: Any) -> tuple[int, int]:
    """Elements of parameters that are shared, and elements in units; without a plan everybody holds everything."""
    plan: Plan | None = getattr(engine, "plan", None)
    shapes: Mapping[str, tuple[int, ...]] = {n: tuple(p.shape) for n, p in engine.module.named_parameters()}
    if plan is not None:
        with engine.dense(resident=True):
            shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    pieces = [piece for unit in plan.units for piece in unit.pieces if piece.kind == "parameter"] if plan else []
    maskable = sum(piece.num_elements(shapes[piece.parameter]) for piece in pieces)
    return sum(math.prod(shape) for shape in shapes.values()) - maskable, maskable


def table_bytes(
    contestant: Contestant, precision: str, coverage: float, num_shared: int, num_maskable: int
) -> dict[str, float]:
    """The table's bytes for units, and its plain row (C = 1) for what is shared."""
    num_ranks, row = dist.get_world_size(), STAGES[contestant.stage]  # at C = 1 they are those of plain ZeRO
    regime, own = ("forward", 1.0) if contestant.regime is None else (contestant.regime, coverage)
    units = bytes_per_parameter(num_ranks, own, bytes_of(precision), regime=regime)[row]
    shared = bytes_per_parameter(num_ranks, 1.0, bytes_of(precision))[row]
    return {k: num_maskable * u + num_shared * s for k, u, s in zip(KINDS, units, shared, strict=True)}


def worst(row: dict[str, Any]) -> float:
    """The largest deviation of the mean over ranks from the table, as a share of the table's figure."""
    means = {kind: sum(rank[kind] for rank in row["ranks"]) / len(row["ranks"]) for kind in KINDS}
    return max(abs(means[kind] / row["expected"][kind] - 1) for kind in KINDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo")
    results = []
    for precision in PRECISIONS:
        for contestant in everybody():
            if contestant.runs_in(precision):
                results.append(measure(contestant, precision, arguments.coverage))
                if dist.get_rank() == 0:
                    print(f"{precision} {contestant.name}: {100 * worst(results[-1]):.1f}% off the table", flush=True)
    if dist.get_rank() == 0:
        facts = {
            "what": "model_state",
            "num_ranks": dist.get_world_size(),
            "model": MODEL,
            "arguments": vars(arguments),
            "results": results,
        }
        write_result(arguments.output, facts)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
