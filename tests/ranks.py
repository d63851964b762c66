"""Spawned ranks for tests: one spawn per world size, many checks inside, a hard time limit.

A check is a function of one `Rank` argument that every rank runs. The first failure ends the spawn, because
ranks may be out of step after it; its traceback is shown whole and later checks report that they did not run.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Rank:
    """What a check is told: who it is, and a folder that all ranks share."""

    rank: int
    size: int
    folder: Path


Check = Callable[[Rank], None]


def run_ranks(size: int, checks: Sequence[tuple[str, Check]], *, timeout: float) -> dict[str, str | None]:
    """Run checks on `size` ranks, one after the other.

    Returns:
        Per check None, or why it failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results: Any = context.Queue()
        processes = [
            context.Process(target=_rank_main, args=(rank, size, folder, checks, results)) for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(size, [name for name, _ in checks], results, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(size: int, names: Sequence[str], results: Any, processes: Any, deadline: float) -> dict[str, str | None]:
    passed = dict.fromkeys(names, 0)
    outcome: dict[str, str | None] = {}
    while len(outcome) < len(names):
        try:
            name, rank, error = results.get(timeout=1)
        except queue.Empty:
            running = next(name for name in names if name not in outcome)
            if time.monotonic() > deadline:
                return _failed(outcome, names, running, "time limit")
            if not any(process.is_alive() for process in processes) and results.empty():
                return _failed(outcome, names, running, "a rank died without a word")
            continue
        if error is not None:
            return _failed(outcome, names, name, f"rank {rank} of {size}:\n{error}")
        passed[name] += 1
        if passed[name] == size:
            outcome[name] = None
    return outcome


def _failed(outcome: dict[str, str | None], names: Sequence[str], name: str, why: str) -> dict[str, str | None]:
    late = {other: f"did not run to its end, because {name} failed" for other in names if other not in outcome}
    return outcome | late | {name: why}


def _rank_main(rank: int, size: int, folder: str, checks: Sequence[tuple[str, Check]], results: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    # The environment's own ninja: another one found first would compile DeepSpeed's operator again, by turns.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Accelerate asks for them; the file decides
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    name = checks[0][0]
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
        )
        for name, check in checks:
            own = Path(folder) / name.replace("/", "_")
            own.mkdir(exist_ok=True)
            check(Rank(rank, size, own))
            results.put((name, rank, None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        results.put((name, rank, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)
