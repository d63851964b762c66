"""What one GPU can show: correctness, memory and step time of one rank of eight, memory of process groups.

    python benchmarks/on_gpu.py values --output benchmarks/results/gpu_values.json  # tests marked gpu
    python benchmarks/on_gpu.py sizes --output benchmarks/results/gpu_sizes.json    # 134M to 1B, rank 3 of 8
    python benchmarks/on_gpu.py groups --output benchmarks/results/gpu_groups.json  # bytes of a process group of NCCL

`values` runs several ranks on the one GPU over gloo, through host memory; --select and --minutes limit it. `sizes` runs
a real rank beside a fake process group: shapes, memory and compute are those of rank 3 of 8, values and communication
are not. It continues where the output file ends. With DS_ACCELERATOR=cpu each section does a little on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
import itertools

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common.contestants import DDP, FSDP2, Contestant, train
from benchmarks.common.device import backend, device, device_name, seconds, take_device
from benchmarks.common.models import LLAMAS, Shape
from benchmarks.common.provenance import write_result
from sdp_deepspeed.config import MODES

ROOT = Path(__file__).parents[1]
TESTS = ("tests/ranks",)
ON_THE_CPU = ("tests/ranks/test_gpu.py",)
OUTCOMES = ("failure", "error", "skipped")  # as pytest's XML calls them; a test without one passed
RANK, WORLD_SIZE = 3, 8
BUCKET = 50_000_000  # elements; at its default of 5e8 stock ZeRO allocates a GB whatever the model


def run_tests(arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = device().type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", "-k", arguments.select]
        # The tests of a file run in one process; several files share the GPU.
        command += ["--gpu", "-n", str(arguments.processes), "--dist", "loadfile", *TESTS] if on_gpu else ON_THE_CPU
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it, and theirs
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            is_complete = process.wait(60 * arguments.minutes) in (0, 1)
        except subprocess.TimeoutExpired:
            is_complete = False
            process.send_signal(signal.SIGINT)  # pytest reports what has run
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        tests = read_report(report)
    return {"is_complete": is_complete, "outcomes": Counter(test["outcome"] for test in tests), "tests": tests}


def read_report(path: Path) -> list[dict[str, Any]]:
    """Name, seconds, outcome and error of each test; empty if pytest did not get so far."""
    if not path.is_file():
        return []
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        found = [
            (child.tag, error_in(child.text or child.get("message") or "")) for child in case if child.tag in OUTCOMES
        ]
        outcome, why = found[0] if found else ("passed", None)
        name = f"{case.get('classname')}::{case.get('name')}"
        tests.append({"name": name, "seconds": float(case.get("time", 0)), "outcome": outcome, "why": why})
    return tests


def error_in(text: str) -> str:
    """The line that names the exception, a rank's own if there is one; a traceback has paths of the machine."""
    lines = [line.removeprefix("E").strip() for line in text.splitlines()]
    named = [line for line in lines if re.match(r"\w*(Error|Exception)\b(?!: rank)", line)]
    return (named or lines)[-1][:200]


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


def run_groups(arguments: argparse.Namespace) -> dict[str, Any]:
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
    parser.add_argument("section", choices=["values", "sizes", "groups"])
    parser.add_argument("--output", required=True, help="path of the JSON with raw figures")
    parser.add_argument("--processes", type=int, default=4, help="of pytest")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which tests are stopped and no cell begins")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=2048, help="sizes: tokens per row")
    parser.add_argument("--rows", type=int, default=4, help="sizes: rows per micro-batch")
    parser.add_argument("--sizes", nargs="+", choices=list(LLAMAS), default=["134M", "500M", "1B"])
    parser.add_argument("--select", default="", help="tests (pytest's -k), or cells (a regular expression)")
    arguments = parser.parse_args()
    facts = {"what": f"gpu_{arguments.section}", "device": device_name(), "arguments": vars(arguments)}

    def write(result: dict[str, Any]) -> None:
        write_result(arguments.output, facts | result)

    match arguments.section:
        case "values":
            write(run_tests(arguments))
        case "sizes":
            write(run_sizes(arguments, write))
        case "groups":
            write(run_groups(arguments))


if __name__ == "__main__":
    main()
