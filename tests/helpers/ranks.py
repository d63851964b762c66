"""Ranks for tests: one set of them per file and world size, many tests inside, hard time limits.

A test with the argument `rank` runs on every rank of a world, whose size a mark says:

    @pytest.mark.world(2)
    def test_the_sum_is_that_of_all(rank: Rank) -> None: ...

`world(2, 4)` runs it in both. One that fails ends these ranks, which may be out of step after it; its traceback is
shown whole, and the tests after it run in ranks that are started anew. So no test may lean on what an earlier one left
in its process. One that leaves something behind which disturbs others comes last in its file.

Ranks are forked from a server that has imported torch, DeepSpeed and Transformers and has done nothing else: each is a
process of its own, as fresh as a new interpreter, without the seconds that these imports take. Ranks on a GPU are new
interpreters, as CUDA may not be forked.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.gpus import ON_A_GPU, ON_THE_CPU

# The slowest check takes ten seconds on an idle machine. What hangs ends by TIMEOUT, with the stacks of all ranks.
TIMEOUT = 240.0  # seconds, of one check
COLLECTIVE_TIMEOUT = timedelta(seconds=2 * TIMEOUT)
ALLOWANCE = 40.0  # seconds for each of many checks: all of them, if the tree is broken, and not `TIMEOUT` for each
PATIENCE = 60.0  # seconds that ranks have to notice that one of them died
TIME_LIMIT = "time limit"

# What checks import, as the server can import it: this folder is not on its path. What it lacks, a rank imports itself.
IMPORTED = ["torch", "deepspeed", "accelerate", "transformers", "sdp_deepspeed.engine.engine", "hypothesis", "pytest"]
# What DeepSpeed imports when it builds an engine, in seconds.
IMPORTED += ["deepspeed.runtime.zero.muon.muon_optimizer", "torch.utils.cpp_extension"]
IMPORTED += ["tests.helpers.known_branches"]
# Ranks are on the CPU, whatever the machine has. A setting of OpenMP counts when torch is imported, not later.
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", **ON_THE_CPU}


@dataclass(frozen=True)
class Rank:
    """What a check is told: who it is, and a folder that all ranks share."""

    rank: int
    size: int
    folder: Path


@dataclass(frozen=True)
class Place:
    """Where ranks are.

    Args:
        backend: of their default group.
        environment: of ranks that are new interpreters; None forks them.
    """

    backend: str = "gloo"
    environment: Mapping[str, str] | None = None


CPU = Place()
GPU = Place("staged", ON_A_GPU)  # all on the machine's first

Check = Callable[[Rank], None]
Named = tuple[str, Check]


def call_on_rank(function: Callable[..., None], arguments: Mapping[str, Any], rank: Rank) -> None:
    """A test with what it was parametrized with."""
    function(rank=rank, **arguments)


def run_ranks(
    size: int, checks: Sequence[Named], *, timeout: float = TIMEOUT, place: Place = CPU
) -> dict[str, str | None]:
    """Run checks on `size` ranks, one after the other; per check None, or why it failed."""
    return dict(each_outcome(size, checks, timeout=timeout, place=place))


def each_outcome(
    size: int, checks: Sequence[Named], *, timeout: float = TIMEOUT, place: Place = CPU
) -> Iterator[tuple[str, str | None]]:
    """As `run_ranks`, each outcome as soon as it is there.

    Args:
        timeout: seconds that one check may take. All together may take that and ALLOWANCE for each; what has not begun
            by then does not run.
    """
    left = deque(checks)
    end = time.monotonic() + timeout + ALLOWANCE * len(checks)
    while left and time.monotonic() < end:
        for outcome in _until_one_fails(size, tuple(left), timeout, place):
            left.popleft()
            yield outcome
    yield from ((name, "did not run: the checks before it took the time of all") for name, _ in left)


def _until_one_fails(
    size: int, checks: Sequence[Named], timeout: float, place: Place
) -> Iterator[tuple[str, str | None]]:
    """Outcomes of checks in one set of ranks, which ends with the first check that fails."""
    context: Any = forkserver_context() if place.environment is None else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, reports = [], _Reports()
        for rank in range(size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, size, folder, checks, writer, place.backend))
            with nullcontext() if place.environment is None else mock.patch.dict(os.environ, place.environment):
                process.start()
            writer.close()  # the rank's own copy is the only one: it closes with the rank
            processes.append(process)
            reports.add(reader, process)
        try:
            for name, _ in checks:
                why = reports.outcome(name, timeout)
                if why == TIME_LIMIT:
                    why += _stacks(processes, Path(folder))
                yield name, why
                if why is not None:
                    break
        finally:
            _end(processes)


class _Reports:
    """What ranks say of their checks, (check, None or traceback) in a pipe of each; one may be ahead of the others."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._ranks: dict[Any, int] = {}  # by pipe that is still open
        self._passed: Counter[str] = Counter()
        self._failed: dict[str, str] = {}

    def add(self, reader: Any, process: Any) -> None:
        self._ranks[reader] = len(self._processes)
        self._processes.append(process)

    def outcome(self, name: str, timeout: float) -> str | None:
        """None once all ranks have passed, or why one of them has not."""
        deadline = time.monotonic() + timeout
        while name not in self._failed and self._passed[name] < len(self._processes):
            if not self._ranks or time.monotonic() > deadline:
                return self._dead() or TIME_LIMIT
            for reader in connection.wait(list(self._ranks), timeout=1):
                self._read(reader)
            if len(self._ranks) < len(self._processes):  # who waits for a rank that is gone notices soon, or never
                deadline = min(deadline, time.monotonic() + PATIENCE)
        return self._failed.get(name)

    def _read(self, reader: Any) -> None:
        try:
            name, error = reader.recv()
        except (EOFError, ConnectionResetError):
            del self._ranks[reader]
            return
        if error is None:
            self._passed[name] += 1
        else:
            rank = f"rank {self._ranks[reader]} of {len(self._processes)}"
            self._failed.setdefault(name, f"{rank}:\n{error}{self._dead()}")

    def _dead(self) -> str:
        """Ranks that ended without a word, with their exit codes; one that fails ends with 1."""
        last = time.monotonic() + 1
        for process in self._processes:  # others may hear of a death before we do
            process.join(timeout=max(0.0, last - time.monotonic()))
        ended = [(rank, process.exitcode) for rank, process in enumerate(self._processes) if process.exitcode != 1]
        return "\n".join(f"rank {rank} died without a word: {code}" for rank, code in ended if code is not None)


def _stacks(processes: Sequence[Any], folder: Path) -> str:
    """Where each rank is; one that has not begun has none."""
    begun = [(process, folder / f"stack-{rank}") for rank, process in enumerate(processes)]
    begun = [(process, file) for process, file in begun if file.exists() and process.is_alive()]
    for process, _ in begun:
        os.kill(process.pid, signal.SIGUSR1)
    for process, _ in begun:
        process.join(timeout=1)  # faulthandler writes at once, also where Python waits in C++
    return "".join(f"\n{file.name}:\n{file.read_text()}" for _, file in begun)


def _end(processes: Sequence[Any]) -> None:
    """Ranks that wait for a dead one get an error and may tidy up; who still runs after that is killed."""
    last = time.monotonic() + 5
    for process in processes:
        process.join(timeout=max(0.0, last - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@functools.cache
def forkserver_context() -> Any:
    """The context whose processes are forked from a server of this process; started when it is first asked for.

    Only then is the environment set: threads of a lighthouse in this process may be reading it later.
    """
    from tests.helpers.more_models import ALL_SPECIMENS

    context = multiprocessing.get_context("forkserver")
    models = {specimen.model.__module__ for specimen in ALL_SPECIMENS.values()}
    context.set_forkserver_preload([*IMPORTED, *sorted(models)])
    with mock.patch.dict(os.environ, SERVER_ENVIRONMENT):
        forkserver.ensure_running()
    return context


def _drop_engines(dist: Any) -> None:
    """Threads of theirs go on else: gloo's look a hundred times a second for what comes, of all engines so far."""
    from sdp_deepspeed.parallel.groups import CONTROL

    gc.collect()
    dist.barrier()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.group_desc == CONTROL]
    for group in groups:
        dist.destroy_process_group(group)


def _rank_main(rank: int, size: int, folder: str, checks: Sequence[Named], reports: Any, backend: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = (Path(folder) / f"stack-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    on_a_gpu = os.environ["DS_ACCELERATOR"] != "cpu"
    local_rank = 0 if on_a_gpu else rank  # which is the number of its GPU
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank), "OMP_NUM_THREADS": "1"}
    # The environment's own ninja: another one found first would compile DeepSpeed's operator again, by turns.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Accelerate asks for them; the file decides
    import numpy
    import torch
    import torch.distributed as dist

    from tests.helpers import staged_gloo

    staged_gloo.register()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32 on a GPU too
    torch.seed()  # else ranks would agree on what nobody seeded, and a test would not see that nobody did
    numpy.random.seed()
    gc.freeze()  # what imports made stays
    name = checks[0][0]
    try:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
        )
        for name, check in checks:
            own = Path(folder) / re.sub(r"\W+", "_", name)
            own.mkdir(exist_ok=True)
            check(Rank(rank, size, own))
            reports.send((name, None))
            _drop_engines(dist)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        reports.send((name, traceback.format_exc()))
        os._exit(1)
