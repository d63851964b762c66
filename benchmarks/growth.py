"""What does a step cost the host as ranks, layers and units grow? One rank of many that are not there.

    OMP_NUM_THREADS=1 python benchmarks/growth.py --ranks 512 --output benchmarks/results/growth_512_ranks.json

Engines as a user builds them, on torch's fake process group: a collective returns at once, and what is received means
nothing, so that DDP, which looks at it, cannot run. The model is narrow, so that a step is nearly all host time, the
model's own included. Times are seconds of this thread, in which waiting for others does not count. Beside a GPU it
needs DS_ACCELERATOR=cpu, as it measures hosts.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import Contestant, train
from benchmarks.common.device import device, device_name
from benchmarks.common.fake_world import fake_world
from benchmarks.common.models import NARROW
from benchmarks.common.provenance import write_result
from benchmarks.common.ranks import option_parser
from benchmarks.common.traffic_counter import TrafficCounter
from benchmarks.systems.subjects import Subject
from sdp_deepspeed.config import MODES

BUCKET = 500_000  # elements; more than eight layers have
COVERAGE = 0.5
RANK = 3  # neither first nor last
FORWARD = [mode for mode in MODES if mode.regime == "forward"]
SUBNETWORKS = (8, 64)  # and where there are more ranks, replicas of them


def subjects(num_ranks: int) -> Iterator[Subject]:
    """Stock ones, then block and neuron units, half of them held by a worker."""
    yield Subject("DeepSpeed", Contestant(1))
    yield Subject("FSDP2")
    for mode, count in itertools.product(FORWARD, SUBNETWORKS):
        if count <= num_ranks:
            yield Subject("DeepSpeed", Contestant(1, mode, COVERAGE, count))


def measure(subject: Subject, num_layers: int, repeats: int) -> dict[str, Any]:
    shape = NARROW | {"num_hidden_layers": num_layers}
    start = time.thread_time()
    engine = subject.build(shape, "fp32", micro_batch=1, bucket=BUCKET)
    building = time.thread_time() - start
    if hasattr(engine, "plan"):  # what nobody sent may be NaN, and the step would be skipped
        engine.optimizer.skips_overflow = False
    batch = torch.zeros(1, 8, dtype=torch.long)
    seconds = []
    for _ in range(2 + repeats):
        start = time.thread_time()
        train(engine, batch)
        seconds.append(time.thread_time() - start)
    with TrafficCounter() as traffic:
        train(engine, batch)
    found = {
        "name": subject.name,
        "num_layers": num_layers,
        "num_subnetworks": subject.contestant.subnetworks if subject.contestant else None,
        **plan_facts(getattr(engine, "plan", None)),
        "building_seconds": building,
        "seconds": seconds[2:],
        "calls": dict(traffic.calls_by_operator),
        "sent": traffic.total,
    }
    engine.destroy()
    return found


def plan_facts(plan: Any) -> dict[str, Any]:
    """Empty for what has none."""
    return {"num_units": len(plan.units), "num_holder_sets": len(set(plan.holders))} if plan else {}


def measure_all(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    results = []
    with fake_world(RANK, arguments.ranks):
        for subject, layers in itertools.product(list(subjects(arguments.ranks)), arguments.layers):
            results.append(measure(subject, layers, arguments.repeats))
            row = results[-1]
            times = f"{row['building_seconds']:.2f} s to build, {1e3 * statistics.median(row['seconds']):.1f} ms"
            print(f"{row['name']}, {row['num_subnetworks']} subnetworks, {layers} layers: {times}", flush=True)
    facts = {"what": "growth", "ranks": arguments.ranks, "model": NARROW, "device": device_name()}
    return facts | {"results": results}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    if device().type != "cpu":
        parser.error(f"it measures the host, and {device_name()} is there: set DS_ACCELERATOR=cpu")
    write_result(arguments.output, measure_all(arguments) | {"arguments": vars(arguments)})


if __name__ == "__main__":
    main()
