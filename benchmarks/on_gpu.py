"""What one GPU can show: memory and step time of one rank of eight, memory of process groups.

    python benchmarks/on_gpu.py sizes --output benchmarks/results/gpu_sizes.json    # 134M to 1B, rank 3 of 8
    python benchmarks/on_gpu.py groups --output benchmarks/results/gpu_groups.json  # bytes of a process group of NCCL

`sizes` runs a real rank beside a fake process group: shapes, memory and compute are those of rank 3 of 8, values and
communication are not. It continues where the output file ends. With DS_ACCELERATOR=cpu it does a little on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.contestants import DDP, FSDP2, Contestant, train
from benchmarks.common.device import backend, device, device_name, seconds, take_device
from benchmarks.common.models import LLAMAS, Shape
from benchmarks.common.provenance import write_result
from sdp_deepspeed.config import MODES

RANK, WORLD_SIZE = 3, 8
BUCKET = 50_000_000  # elements; at its default of 5e8 stock ZeRO allocates a GB whatever the model


def averaged(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's default hook, which instead takes the result from the collective's future; a fake one's is empty."""
    future: Any = torch.futures.Future(devices=[device()] if device().type == "cuda" else None)
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer, async_op=True).wait()
    future.set_result(buffer)
    result: torch.futures.Future[torch.Tensor] = future
    return result


CONTESTANTS = {
    "DDP": DDP,
    "ZeRO-1": Contestant(1),
    "FSDP2": FSDP2,
    "SDP + ZeRO-1, forward x block, C=1": Contestant(1, MODES[0], 1.0),
    **{f"SDP + ZeRO-1, {mode}, C=0.5": Contestant(1, mode, 0.5) for mode in MODES},
    **{f"SDP + FSDP2, {mode}, C=0.5": Contestant(3, mode, 0.5, host="FSDP2") for mode in MODES[:2]},
}


def measure(
    contestant: Contestant, shape: Shape, rows: int, sequence: int, *, checkpointing: bool, repeats: int
) -> dict[str, Any]:
    """Seconds of steps, bytes of live tensors before a step and at most in it, FLOPs of matrix products."""
    on_gpu = device().type == "cuda"
    tokens = torch.randint(0, shape["vocab_size"], (rows, sequence), device=device())
    engine = contestant.build(shape, "bf16", micro_batch=rows, bucket=BUCKET)
    if contestant is DDP:
        engine.runs.register_comm_hook(None, lambda state, bucket: averaged(bucket))  # it reads annotations as strings
    if checkpointing:
        engine.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for _ in range(2):  # everything that is allocated once exists
        train(engine, tokens)
    figures: dict[str, Any] = {}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        figures["state"] = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeats):
        begin = seconds()
        train(engine, tokens)
        times.append(seconds() - begin)
    if on_gpu:
        figures["peak"] = torch.cuda.max_memory_allocated()
    figures |= {"seconds": times, "median": median(times), "flops": flops_of(partial(train, engine, tokens))}
    engine.destroy()
    return figures


def flops_of(run: Callable[[], Any]) -> int | None:
    """None where torch (2.11) has no formula for heads that share keys."""
    try:
        with FlopCounterMode(display=False) as counter:
            run()
    except AssertionError:
        return None
    return int(counter.get_total_flops())


def collect() -> None:
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()


def run_sizes(arguments: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure cells that the output lacks, until the time is over; each is written at once."""
    from benchmarks.common.fake_world import fake_world

    on_gpu, path = device().type == "cuda", Path(arguments.output)
    results = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    rows, sequence, repeats = (arguments.rows, arguments.sequence, arguments.repeats) if on_gpu else (1, 16, 1)
    sizes = arguments.sizes if on_gpu else ["tiny"]
    cells: list[dict[str, Any]] = [
        {"size": s, "name": n, "checkpointing": c, "rows": rows, "sequence": sequence, "device": device_name()}
        for s in sizes
        for c in (False, True)
        for n in CONTESTANTS
        if re.search(arguments.select, f"{s}, {n}{', checkpointing' * c}")
    ]
    todo = [cell for cell in cells if not any(cell.items() <= result.items() for result in results)]
    end = time.monotonic() + 60 * arguments.minutes
    with fake_world(RANK, WORLD_SIZE):
        while todo and time.monotonic() < end:
            cell = todo.pop(0)
            contestant, shape = CONTESTANTS[cell["name"]], LLAMAS[cell["size"]]
            try:
                figures = measure(
                    contestant, shape, rows, sequence, checkpointing=cell["checkpointing"], repeats=repeats
                )
            except torch.OutOfMemoryError as error:
                figures = {"not_measured": str(error).partition("\n")[0]}
            collect()
            results.append(cell | figures)
            write({"results": results})
            print(cell["size"], cell["name"], "checkpointing" * cell["checkpointing"], figures, flush=True)
    return {"is_complete": not todo, "results": results}


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
    parser.add_argument("--minutes", type=float, default=9.0, help="after which no cell begins")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=2048, help="sizes: tokens per row")
    parser.add_argument("--rows", type=int, default=4, help="sizes: rows per micro-batch")
    parser.add_argument("--sizes", nargs="+", choices=list(LLAMAS), default=["134M", "500M", "1B"])
    parser.add_argument("--select", default="", help="sizes: cells, by a regular expression")
    arguments = parser.parse_args()
    facts = {"what": f"gpu_{arguments.section}", "device": device_name(), "arguments": vars(arguments)}

    def write(result: dict[str, Any]) -> None:
        write_result(arguments.output, facts | result)

    write(run_sizes(arguments, write) if arguments.section == "sizes" else run_groups())


if __name__ == "__main__":
    main()
