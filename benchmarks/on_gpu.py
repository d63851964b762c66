"""What one GPU can show: memory and step time of one rank of eight, memory of process groups.

    python benchmarks/on_gpu.py sizes --output benchmarks/results/gpu_sizes.json    # 1B parameters, rank 3 of 8
    python benchmarks/on_gpu.py groups --output benchmarks/results/gpu_groups.json  # bytes of a process group of NCCL

`sizes` runs a real rank beside a fake process group: shapes, memory and compute are those of rank 3 of 8, values and
communication are not. With DS_ACCELERATOR=cpu it runs a tiny model.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.contestants import CONTESTANTS, DDP, Contestant, train
from benchmarks.common.device import backend, device, device_name, seconds, take_device
from benchmarks.common.fake_world import fake_world
from benchmarks.common.models import LLAMAS, Shape
from benchmarks.common.provenance import write_result

RANK, WORLD_SIZE = 3, 8
BUCKET = 50_000_000  # elements; at its default of 5e8 stock ZeRO allocates a GB whatever the model
REPEATS = 5
LEFT_OUT = ("DDP, activation checkpointing", "ZeRO-3", "forward x block + ZeRO-1 C=0.25")


def averaged(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's default hook, which instead takes the result from the collective's future; a fake one's is empty."""
    future: Any = torch.futures.Future(devices=[device()] if device().type == "cuda" else None)
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer, async_op=True).wait()
    future.set_result(buffer)
    result: torch.futures.Future[torch.Tensor] = future
    return result


def measure(contestant: Contestant, shape: Shape, rows: int, sequence: int) -> dict[str, Any]:
    """Seconds of steps, bytes of live tensors before a step and at most in it, FLOPs of matrix products."""
    on_gpu = device().type == "cuda"
    tokens = torch.randint(0, shape["vocab_size"], (rows, sequence), device=device())
    engine = contestant.build(shape, "bf16", micro_batch=rows, bucket=BUCKET)
    if contestant is DDP:
        engine.runs.register_comm_hook(None, lambda state, bucket: averaged(bucket))  # it reads annotations as strings
    for _ in range(2):  # everything that is allocated once exists
        train(engine, tokens)
    figures: dict[str, Any] = {"name": contestant.name}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        figures["state"] = torch.cuda.memory_allocated()
    times = []
    for _ in range(REPEATS):
        begin = seconds()
        train(engine, tokens)
        times.append(seconds() - begin)
    if on_gpu:
        figures["peak"] = torch.cuda.max_memory_allocated()
    with FlopCounterMode(display=False) as counter:
        train(engine, tokens)
    engine.destroy()
    return figures | {"seconds": times, "median": median(times), "flops": counter.get_total_flops()}


def run_sizes() -> dict[str, Any]:
    on_gpu = device().type == "cuda"
    size, rows, sequence = ("1B", 4, 2048) if on_gpu else ("tiny", 1, 16)
    results = []
    with fake_world(RANK, WORLD_SIZE):
        for contestant in (row for row in CONTESTANTS if row.name not in LEFT_OUT):
            results.append(measure(contestant, LLAMAS[size], rows, sequence))
            print(results[-1], flush=True)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    return {"size": size, "rows": rows, "sequence": sequence, "results": results}


def run_groups() -> dict[str, Any]:
    """Device bytes of each further process group of this rank alone, after its first use."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    take_device()
    on_gpu = device().type == "cuda"
    dist.init_process_group(backend() or "nccl", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.ones(1 << 20, device=device())
    free = []
    for _ in range(9):
        group: Any = dist.new_group([0])
        dist.all_reduce(tensor, group=group)
        seconds()
        free.append(torch.cuda.mem_get_info()[0] if on_gpu else 0)
    dist.destroy_process_group()
    return {"bytes_of_each": [before - after for before, after in itertools.pairwise(free)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", choices=["sizes", "groups"])
    parser.add_argument("--output", required=True, help="path of the JSON with raw figures")
    arguments = parser.parse_args()
    result = run_sizes() if arguments.section == "sizes" else run_groups()
    write_result(arguments.output, {"what": f"gpu_{arguments.section}", "device": device_name(), **result})


if __name__ == "__main__":
    main()
