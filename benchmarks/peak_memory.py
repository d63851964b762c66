"""How high does memory rise in a step of a 50M-parameter model, beside what the step has to hold?

    OMP_NUM_THREADS=1 deepspeed --num_gpus 2 benchmarks/peak_memory.py --output benchmarks/results/peak_2_ranks.json

What it has to hold: weights, gradients and optimizer state (measured; `benchmarks/model_state.py` sets them against
the formulas), and two buckets, one to send and one to receive. Weights of two bytes are stepped with an fp32 gradient
of what a rank owns, which the formulas leave out, and so does this. The sequence is so short that
activations hardly count; they are not taken off. All tensors of a contestant count, also those that lived before the
step. The optimizer is torch's fused AdamW, which needs no scratch memory; `--scratch` takes the one that does.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import PRECISIONS, Contestant, bytes_of, engine_of, everybody, train
from benchmarks.common.measured_step import measured_step
from benchmarks.common.models import LARGE
from benchmarks.common.ranks import gather, option_parser, run, show
from benchmarks.tables.counts import worst_share
from sdp_deepspeed.estimate.per_rank import Precision

SEQUENCE_LENGTH = 8
LIMIT = 1.1  # of state and two buckets


def live_tensors() -> list[torch.Tensor]:
    """All tensors of this contestant, however they are reached; what was there before it is frozen and not found."""
    gc.collect()
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return [tensor for tensor in found if tensor.device.type != "meta"]  # which takes no memory


def measure_one(contestant: Contestant, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One contestant: figures of every rank; a collective."""
    bucket = int(arguments.bucket)
    config = contestant.config(precision, bucket=bucket, fused=not arguments.scratch, overlap=arguments.overlap)
    batch = torch.randint(0, LARGE["vocab_size"], (1, SEQUENCE_LENGTH))
    gc.collect()
    gc.freeze()
    with engine_of(LARGE, config | {"gradient_accumulation_steps": arguments.accumulation}) as engine:
        for _ in range(2):  # with the second one all that is made once is there
            train(engine, batch)
        with measured_step(engine, others=live_tensors()) as figures:
            train(engine, batch)
        resting = sum(storage.nbytes() for storage in storages(live_tensors()))
    gc.unfreeze()
    ranks = gather(asdict(figures) | {"resting": resting})
    two_buckets = 2 * bucket * bytes_of(precision).wire
    row = {"name": contestant.name, "precision": precision, "two_buckets": two_buckets, "ranks": ranks}
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


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results = []
    contestants = everybody(arguments.coverage, arguments.stages)
    for precision, contestant in itertools.product(arguments.precisions, contestants):
        if contestant.runs_in(precision):
            row = measure_one(contestant, precision, arguments)
            worst = worst_share(row)
            show(f"{precision} {contestant.name}: {worst.share:.3f}, {worst.share_with_gradient:.3f}")
            results.append(row)
    facts = {"num_ranks": dist.get_world_size(), "model": LARGE, "arguments": vars(arguments), "limit": LIMIT}
    return {"what": "peak_memory", **facts, "results": results}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--bucket", type=float, default=2e6, help="elements; DeepSpeed's 5e8 exceeds the model")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--scratch", action="store_true", help="torch's AdamW that is not fused")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    run(parser, measure)


if __name__ == "__main__":
    main()
