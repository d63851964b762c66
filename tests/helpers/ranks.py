"""Spawned ranks for tests: one spawn per world size, many checks inside, a hard time limit.

A check is a function of one `Rank` argument that every rank runs. The first failure ends the spawn, because
ranks may be out of step after it; its traceback is shown whole and later checks report that they did not run.

Ranks are forked from a server that has imported torch, DeepSpeed and Transformers and has done nothing else: each is a
process of its own, as fresh as a new interpreter, without the seconds that these imports take.
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
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

COLLECTIVE_TIMEOUT = timedelta(seconds=60)

# What checks import, as the server can import it: this folder is not on its path. What it lacks, a rank imports itself.
MODELS = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3")
IMPORTED = [
    *("torch", "deepspeed", "accelerate", "transformers", "sdp_deepspeed.engine.engine"),
    *(f"transformers.models.{model}.modeling_{model}" for model in MODELS),
    *("hypothesis", "pytest"),
]
# A setting of OpenMP counts when torch is imported, not later. Asking for a GPU must not start CUDA in the server: no
# process that is forked afterwards could use it.
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


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
    context = _server()
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
            last = time.monotonic() + 5
            for process in processes:
                process.join(timeout=max(0.0, last - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()


def _server() -> Any:
    """The context whose processes are forked from a server of this process; started when it is first asked for."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, SERVER_ENVIRONMENT):
        forkserver.ensure_running()
    return context


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
    import numpy
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.seed()  # else ranks would agree on what nobody seeded, and a test would not see that nobody did
    numpy.random.seed()
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
