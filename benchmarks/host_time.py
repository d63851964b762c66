"""Host time of a step with the structure of a 7B model on many ranks, measured on one rank of a fake world.

    OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu python benchmarks/host_time.py --output benchmarks/results/host_time.json

Engines as a user builds them, on PyTorch's fake process group: collectives return at once, and values are invalid.
The model has the layers and heads of a 7B Llama, so also its units, slices, buckets and collectives, but a width of 256
in place of 4096 (buckets are smaller by as much), so that little but host time is left. Times are seconds of this
thread, in which waiting does not count: `pass` is forward and backward, the model's own time included, `step` the rest.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.contestants import FSDP2, Contestant, train
from benchmarks.common.device import device
from benchmarks.common.fake_world import fake_world
from benchmarks.common.models import SMALL, num_parameters
from benchmarks.common.provenance import write_result
from benchmarks.common.ranks import option_parser
from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.config import Mode

SHAPE = SMALL | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 2000}
BUCKET = 2_000_000  # elements; as many buckets as 7B parameters have with DeepSpeed's 5e8
RANK = 3  # neither first nor last
CASES = [
    (256, Contestant(1)),
    (256, FSDP2),
    (256, Contestant(1, Mode("forward", "block"), 0.5)),
    (256, Contestant(1, Mode("forward", "block"), 0.5, 256)),
    (64, Contestant(1)),
    (64, Contestant(1, Mode("forward", "neuron"), 0.5)),
    (64, Contestant(1, Mode("forward", "neuron"), 0.5, 64)),
    (64, Contestant(3, Mode("forward", "neuron"), 0.5, host="FSDP2")),
]


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    if device().type != "cpu":
        parser.error("host_time.py measures the CPU; set DS_ACCELERATOR=cpu")
    shape = SHAPE | {"num_hidden_layers": arguments.layers}
    results = []
    for num_ranks, contestant in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # DeepSpeed keeps the groups of each world
            results.append(pool.apply(measure, (num_ranks, contestant, shape, arguments.repeats)))
        row = results[-1]
        parts = ", ".join(f"{part} {1e3 * statistics.median(row[part]):.1f} ms" for part in ("pass", "step"))
        print(f"{num_ranks} ranks, {row['name']}: {parts}", flush=True)
    model = shape | {"num_parameters": num_parameters(shape)}
    facts = {"what": "host_time", "model": model, "arguments": vars(arguments), "device": "CPU"}
    write_result(arguments.output, facts | {"results": results})


def measure(num_ranks: int, contestant: Contestant, shape: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Thread seconds of each part of a step."""
    torch.set_num_threads(1)
    with fake_world(RANK, num_ranks):
        start = time.thread_time()
        engine = contestant.build(shape, "fp32", micro_batch=1, bucket=BUCKET)
        found: dict[str, Any] = {"ranks": num_ranks, "name": contestant.name}
        found |= {"building_seconds": time.thread_time() - start, "pass": [], "step": []}
        if contestant.mode:
            if contestant.host == "DeepSpeed":
                engine.optimizer.skips_overflow = False  # received values are invalid, possibly NaN
            found |= {"subnetworks": engine.plan.num_subnetworks, "units": len(engine.plan.units)}
        batch = torch.zeros(1, 8, dtype=torch.long)
        for repeat in range(2 + repeats):
            start = time.thread_time()
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            middle = time.thread_time()
            engine.step()
            end = time.thread_time()
            if repeat >= 2:
                found["pass"].append(middle - start)
                found["step"].append(end - middle)
        with TrafficCounter() as traffic:
            train(engine, batch)
            found["collectives"] = traffic.num_collectives
        return found | {"process_groups": len(traffic.groups)}


if __name__ == "__main__":
    main()
