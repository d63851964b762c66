"""Bytes of weights, gradients and optimizer state on each rank, measured, beside DESIGN.md's table and beside ZeRO.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/model_state.py --output benchmarks/results/model_state_4.json

Every contestant trains two steps; the second is measured with a tracker of live tensors. No time is taken here.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from provenance import write_result
from step_time import MODEL, SEQUENCE_LENGTH
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed  # noqa: F401  (arms the seam)
from sdp_deepspeed.estimate import Precision, bytes_per_parameter
from sdp_deepspeed.measure import measured_step
from sdp_deepspeed.plan import Plan

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}
BUCKET_ELEMENTS = 2_000_000  # at the default of 5e8, stock ZeRO-1 allocates buffers that dwarf this model
CORNERS = list(itertools.product(("forward", "backward"), ("block", "neuron")))
STAGES = {0: "SDP, stage 0", 1: "SDP + ZeRO-1"}  # rows of DESIGN.md's table
KINDS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Contestant:
    """One row of the result: plain DeepSpeed when `regime` is None."""

    stage: int
    regime: str | None = None
    strategy: str | None = None

    @property
    def name(self) -> str:
        if self.regime is None:
            return f"ZeRO-{self.stage}"
        return STAGES[self.stage].replace("SDP", f"{self.regime} x {self.strategy}")

    def block(self, coverage: float) -> dict[str, Any]:
        """What the config has besides the host's keys."""
        if self.regime is None:
            return {}
        return {
            "subnetwork_data_parallel": {"coverage": coverage, "regime": self.regime, "strategy": self.strategy},
        }


CONTESTANTS = [Contestant(stage) for stage in STAGES] + [
    Contestant(stage, *corner) for corner, stage in itertools.product(CORNERS, STAGES)
]


def measure(contestant: Contestant, precision: str, coverage: float) -> dict[str, Any]:
    """One contestant: the figures of every rank, and the table's figure for their mean."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": contestant.stage, "reduce_bucket_size": BUCKET_ELEMENTS},
        **PRECISIONS[precision],
        **contestant.block(coverage),
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    counts = count(shapes, getattr(engine, "plan", None))
    batch = torch.randint(0, MODEL["vocab_size"], (1, SEQUENCE_LENGTH))
    train(engine, batch)
    with measured_step(engine) as figures:
        train(engine, batch)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, asdict(figures))
    engine.destroy()
    return {
        "name": contestant.name,
        "precision": precision,
        "num_shared": counts[0],
        "num_maskable": counts[1],
        "expected": table_bytes(contestant, precision, coverage, *counts),
        "ranks": ranks,
    }


def count(shapes: Mapping[str, tuple[int, ...]], plan: Plan | None) -> tuple[int, int]:
    """Elements of parameters that are shared, and elements in units; without a plan everybody holds everything."""
    pieces = [piece for unit in plan.units for piece in unit.pieces if piece.kind == "parameter"] if plan else []
    maskable = sum(piece.num_elements(shapes[piece.parameter]) for piece in pieces)
    return sum(math.prod(shape) for shape in shapes.values()) - maskable, maskable


def table_bytes(
    contestant: Contestant, precision: str, coverage: float, num_shared: int, num_maskable: int
) -> dict[str, float]:
    """The table's bytes for units, and its plain row (C = 1) for what is shared."""
    bytes_of = Precision.of("fp32" if precision == "fp32" else "bf16", accumulate_in_fp32="accumulation" in precision)
    num_ranks, row = dist.get_world_size(), STAGES[contestant.stage]  # at C = 1 they are those of plain ZeRO
    regime, own = ("forward", 1.0) if contestant.regime is None else (contestant.regime, coverage)
    units = bytes_per_parameter(num_ranks, own, bytes_of, regime=regime)[row]
    shared = bytes_per_parameter(num_ranks, 1.0, bytes_of)[row]
    return {k: num_maskable * u + num_shared * s for k, u, s in zip(KINDS, units, shared, strict=True)}


def train(engine: Any, batch: torch.Tensor) -> None:
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo")
    results = []
    for precision in PRECISIONS:
        for contestant in CONTESTANTS:
            if contestant.stage == 1 or "accumulation" not in precision:  # DeepSpeed refuses fp32 sums at stage 0
                results.append(measure(contestant, precision, arguments.coverage))
                gc.collect()
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
