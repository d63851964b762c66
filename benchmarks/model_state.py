"""Bytes of weights, gradients and optimizer state on each rank, measured, beside DESIGN.md's table and beside ZeRO.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/model_state.py --output benchmarks/results/model_state_4.json

Every contestant trains two steps; the second is measured with a tracker of live tensors. No time is taken here.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict
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

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}
BUCKET_ELEMENTS = 2_000_000  # at the default of 5e8, stock ZeRO-1 allocates buffers that dwarf this model
ROWS = {  # name: (row of the table, stage, with the block)
    "ZeRO-0": ("DDP / ZeRO-0", 0, False),
    "ZeRO-1": ("ZeRO-1", 1, False),
    "SDP, stage 0": ("SDP, stage 0", 0, True),
    "SDP + ZeRO-1": ("SDP + ZeRO-1", 1, True),
}


def measure(name: str, precision: str, coverage: float) -> dict[str, Any]:
    """One contestant: the figures of every rank, and the table's figure for their mean."""
    row, stage, with_block = ROWS[name]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS},
        **PRECISIONS[precision],
    }
    if with_block:
        config["subnetwork_data_parallel"] = {"coverage": coverage}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    num_shared, num_maskable = count(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batch = torch.randint(0, MODEL["vocab_size"], (1, SEQUENCE_LENGTH))
    train(engine, batch)
    with measured_step(engine) as figures:
        train(engine, batch)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, asdict(figures))
    expected = table_bytes(row, precision, coverage if with_block else 1.0, num_shared, num_maskable)
    engine.destroy()
    return {"name": name, "precision": precision, "expected": expected, "ranks": ranks}


def count(model: torch.nn.Module) -> tuple[int, int]:
    """Elements that are shared, and elements in units."""
    maskable = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name)
    return sum(p.numel() for p in model.parameters()) - maskable, maskable


def table_bytes(row: str, precision: str, coverage: float, num_shared: int, num_maskable: int) -> dict[str, float]:
    """The table's bytes for units, and its plain row (C = 1) for what is shared."""
    bytes_of = Precision.of("fp32" if precision == "fp32" else "bf16", accumulate_in_fp32="accumulation" in precision)
    num_ranks = dist.get_world_size()
    units = bytes_per_parameter(num_ranks, coverage, bytes_of)[row]
    shared = bytes_per_parameter(num_ranks, 1.0, bytes_of)[row]
    kinds = ("weights", "gradients", "optimizer")
    return {k: num_maskable * u + num_shared * s for k, u, s in zip(kinds, units, shared, strict=True)}


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
        for name, (_, stage, _) in ROWS.items():
            if stage == 1 or "accumulation" not in precision:  # stock DeepSpeed refuses fp32 sums at stage 0
                results.append(measure(name, precision, arguments.coverage))
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
