"""How many collectives does a step make? They follow the number of buckets, not that of units.

    OMP_NUM_THREADS=1 deepspeed --num_gpus 4 benchmarks/collectives.py --output benchmarks/results/collectives.json

Models of few and of many layers. Each c10d call of a rank counts, those for scalars (norm, overflow) too. Two bucket
sizes: larger than any of the models, and a share of each model, so that the number of buckets hardly depends on the
number of layers either. Plain DeepSpeed is alone where so many ranks cannot have the coverage.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import Contestant, engine_of, everybody, train
from benchmarks.common.models import NARROW, num_parameters
from benchmarks.common.ranks import gather, option_parser, run, show
from benchmarks.common.traffic_counter import TrafficCounter
from benchmarks.systems.subjects import possible

ONE_BUCKET = 4_000_000  # elements; more than any of the models has


def count_calls(contestant: Contestant, num_layers: int, share: int | None) -> dict[str, Any]:
    """Calls of a step after the first by operator, on each rank; a collective.

    Args:
        share: a bucket is one part of so many of the model; None for one bucket.
    """
    model = NARROW | {"num_hidden_layers": num_layers}
    size = num_parameters(model)
    bucket = ONE_BUCKET if share is None else size // share
    batch = torch.randint(0, model["vocab_size"], (1, 8))
    with engine_of(model, contestant.config("fp32", bucket=bucket)) as engine:
        num_units = len(engine.plan.units) if contestant.mode else None
        train(engine, batch)
        with TrafficCounter() as counter:
            train(engine, batch)
    facts = {"num_layers": num_layers, "num_parameters": size, "num_units": num_units, "bucket": bucket}
    return {"name": contestant.name, "share": share, **facts, "ranks": gather(dict(counter.calls_by_operator))}


def possible_contestants(coverage: float, num_ranks: int) -> list[Contestant]:
    """Plain DeepSpeed alone where so many ranks cannot have that coverage."""
    is_possible = bool(possible([coverage], num_ranks))
    return [contestant for contestant in everybody(coverage) if contestant.mode is None or is_possible]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results = []
    shares = (None, arguments.share)
    contestants = possible_contestants(arguments.coverage, dist.get_world_size())
    for contestant, share, num_layers in itertools.product(contestants, shares, arguments.layers):
        row = count_calls(contestant, num_layers, share)
        show(f"{row['name']}, {num_layers} layers, bucket {row['bucket']}: {row['ranks'][0]}")
        results.append(row)
    facts = {"num_ranks": dist.get_world_size(), "model": NARROW, "arguments": vars(arguments)}
    return {"what": "collectives", **facts, "results": results}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--share", type=int, default=8, help="parts of the model that the smaller buckets hold one of")
    run(parser, measure)


if __name__ == "__main__":
    main()
