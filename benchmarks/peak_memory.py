"""Peak of live tensors in a step of a 50M-parameter model, beside what it has to be.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/peak_memory.py --output benchmarks/results/peak_2_ranks.json

What it has to be: weights, gradients and optimizer state (measured; `benchmarks/model_state.py` sets them against
DESIGN.md's table), and two buckets, one to send and one to receive. Weights of two bytes are stepped with an fp32
gradient of what a rank owns, which the table mentions apart, and so does this. The sequence is so short that
activations hardly count; they are not taken off. All tensors of a contestant count, also those that lived before the
step. The optimizer is torch's fused AdamW, which needs no scratch memory; `--scratch` takes the one that does.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common.contestants import PRECISIONS, Contestant, bytes_of, engine_of, everybody, train
from common.provenance import write_result
from step_time import MODEL

from sdp_deepspeed.estimate.per_rank import Precision
from sdp_deepspeed.measure.step import measured_step

# 50.2M parameters: 49.6M in 10 layers, the rest embeddings (tied) of few tokens, so that logits are small.
LARGE = MODEL | {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
}
SEQUENCE_LENGTH = 8
LIMIT = 1.1  # of state and two buckets


def live_tensors() -> list[torch.Tensor]:
    """All tensors of this contestant, however they are reached; what was there before it is frozen and not found."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]


def measure(contestant: Contestant, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One contestant: figures of every rank; a collective."""
    bucket = int(arguments.bucket)
    config = contestant.config(precision, bucket=bucket, coverage=arguments.coverage, fused=not arguments.scratch)
    config["gradient_accumulation_steps"] = arguments.accumulation
    config["zero_optimization"]["overlap_comm"] = arguments.overlap
    batch = torch.randint(0, LARGE["vocab_size"], (1, SEQUENCE_LENGTH))
    gc.collect()
    gc.freeze()
    with engine_of(LARGE, config) as engine:
        for _ in range(2):  # with the second one all that is made once is there
            train(engine, batch)
        with measured_step(engine, others=live_tensors()) as figures:
            train(engine, batch)
        own = asdict(figures) | {"resting": sum(storage.nbytes() for storage in storages(live_tensors()))}
    gc.unfreeze()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    buckets = 2 * bucket * bytes_of(precision).wire
    row = {"name": contestant.name, "precision": precision, "two_buckets": buckets, "ranks": ranks}
    return row | {"step_gradients": step_gradients(contestant, ranks, bytes_of(precision))}


def step_gradients(contestant: Contestant, ranks: list[dict[str, Any]], precision: Precision) -> list[int]:
    """Bytes on each rank of fp32 gradients that an fp32 master's step needs besides those that were there."""
    if precision.weights == 4 or (contestant.stage == 2 and precision.gradients == 4):
        return [0] * len(ranks)
    return [rank["optimizer"] // 3 for rank in ranks]  # beside a master and two moments


def storages(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for pointer, storage in found.items() if pointer]


def shares(row: dict[str, Any]) -> tuple[float, float]:
    """The worst rank's peak as a share of state and two buckets, and of these with the step's fp32 gradients."""
    states = [sum(rank[k] for k in ("weights", "gradients", "optimizer")) + row["two_buckets"] for rank in row["ranks"]]
    peaks = [rank["peak"] for rank in row["ranks"]]
    more = [state + step for state, step in zip(states, row["step_gradients"], strict=True)]
    strict, with_step = (max(p / a for p, a in zip(peaks, allowed, strict=True)) for allowed in (states, more))
    return strict, with_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--bucket", type=float, default=2e6, help="elements; DeepSpeed's 5e8 exceeds the model")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--scratch", action="store_true", help="torch's AdamW that is not fused")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo")
    results = []
    for precision in arguments.precisions:
        for contestant in everybody(tuple(arguments.stages)):
            if contestant.runs_in(precision):
                results.append(measure(contestant, precision, arguments))
                if dist.get_rank() == 0:
                    strict, with_step = shares(results[-1])
                    print(f"{precision} {contestant.name}: {strict:.3f}, {with_step:.3f}", flush=True)
    if dist.get_rank() == 0:
        facts = {"num_ranks": dist.get_world_size(), "model": LARGE, "arguments": vars(arguments), "limit": LIMIT}
        write_result(arguments.output, {"what": "peak_memory", **facts, "results": results})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
