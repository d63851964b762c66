"""Collectives of one step for models of few and of many layers: they follow the number of buckets, not that of units.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/collectives.py --output benchmarks/results/collectives.json

Each c10d call of a rank counts, those for scalars (norm, overflow) too. Two bucket sizes: larger than any of the
models, and a share of each model, so that the number of buckets hardly depends on the number of layers either.
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common.contestants import Contestant, engine_of, everybody, train
from common.provenance import write_result
from step_time import MODEL

from sdp_deepspeed.measure.traffic import TrafficCounter

# Small layers: only their number matters here.
SMALL = MODEL | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
ONE_BUCKET = 4_000_000  # elements; more than any of the models has


def measure(contestant: Contestant, num_layers: int, share: int | None, coverage: float) -> dict[str, Any]:
    """Calls of a step after the first by operator, on each rank; a collective.

    Args:
        share: a bucket is one part of so many of the model; None for one bucket.
    """
    model = SMALL | {"num_hidden_layers": num_layers}
    num_parameters = count(model)
    bucket = ONE_BUCKET if share is None else num_parameters // share
    batch = torch.randint(0, model["vocab_size"], (1, 8))
    with engine_of(model, contestant.config("fp32", bucket=bucket, coverage=coverage)) as engine:
        num_units = len(engine.plan.units) if contestant.regime else None
        train(engine, batch)
        with TrafficCounter() as counter:
            train(engine, batch)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dict(counter.calls_by_operator))
    facts = {"num_layers": num_layers, "num_parameters": num_parameters, "num_units": num_units, "bucket": bucket}
    return {"name": contestant.name, "share": share, **facts, "ranks": ranks}


def count(model: dict[str, Any]) -> int:
    """Parameters of the (tied) Llama."""
    width = model["hidden_size"]
    layer = 4 * width * width + 3 * width * model["intermediate_size"] + 2 * width
    return int(model["num_hidden_layers"] * layer + model["vocab_size"] * width + width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=str, required=True)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--share", type=int, default=8, help="parts of the model that the smaller buckets hold one of")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    deepspeed.init_distributed("gloo")
    results = []
    for contestant in everybody():
        for share in (None, arguments.share):
            for num_layers in arguments.layers:
                results.append(measure(contestant, num_layers, share, arguments.coverage))
                if dist.get_rank() == 0:
                    last = results[-1]
                    print(
                        f"{last['name']}, {num_layers} layers, bucket {last['bucket']}: {last['ranks'][0]}", flush=True
                    )
    if dist.get_rank() == 0:
        facts = {"num_ranks": dist.get_world_size(), "model": SMALL, "arguments": vars(arguments)}
        write_result(arguments.output, {"what": "collectives", **facts, "results": results})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
