"""Teams for tests: each a world of its own of forked ranks, which meet at a lighthouse in the process of the test."""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.ranks import TIMEOUT, forkserver_context

# Seconds until the lighthouse misses a team: where one ends, and where none does, since a machine under load is late.
MISSED, NEVER_MISSED = 6.0, 1000.0


@dataclass(frozen=True)
class Place:
    """What the function of a rank is told."""

    team: int
    rank: int
    size: int
    folder: Path


@dataclass
class StartedTeam:
    """The ranks of a team."""

    processes: list[Any]
    errors: list[Path]

    def wait(self, timeout: float = TIMEOUT) -> list[int]:
        """Exit codes; ranks that do not end are killed, after they have written their stacks."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
                process.join(2)
                process.kill()
                process.join()
        return [process.exitcode for process in self.processes]

    def error(self) -> str:
        """What the ranks have written, and stacks of those that did not end."""
        files = [*self.errors, *(file.with_suffix(".stack") for file in self.errors)]
        return "\n".join(file.read_text() for file in files if file.exists())

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@dataclass
class Teams:
    """Starts teams of one run.

    Args:
        address: of the lighthouse.
        folder: that all share.
    """

    address: str
    folder: Path
    started: list[StartedTeam] = field(default_factory=list)

    def start(
        self, function: Callable[..., None], team: int, size: int = 1, *arguments: Any, **environment: str
    ) -> StartedTeam:
        """Start the ranks of a team; each calls `function(place, *arguments)`."""
        context = forkserver_context()
        name = uuid.uuid4().hex[:8]
        errors = [self.folder / f"error-{team}-{rank}-{name}" for rank in range(size)]
        variables = {"SDP_TEAM": str(team), "TORCHFT_LIGHTHOUSE": self.address, "RUST_LOG": "error", **environment}
        processes = []
        for rank in range(size):
            place = Place(team, rank, size, self.folder)
            processes.append(
                context.Process(target=_main, args=(function, place, variables, name, errors[rank], arguments))
            )
            processes[-1].start()
        self.started.append(StartedTeam(processes, errors))
        return self.started[-1]

    def finish(self, *started: StartedTeam) -> None:
        """Wait for these teams, or all; fail with the errors of all once one fails, as others may wait for it."""
        waited = started or tuple(self.started)
        alive, end = [process for team in waited for process in team.processes], time.monotonic() + TIMEOUT
        while alive and time.monotonic() < end and not any(process.exitcode for process in alive):
            multiprocessing.connection.wait([process.sentinel for process in alive], end - time.monotonic())
            alive = [process for process in alive if process.exitcode != 0]
        codes = [team.wait(5.0 if alive else TIMEOUT) for team in waited]
        assert not any(map(any, codes)), (codes, *(team.error() for team in waited))


@contextmanager
def teams(folder: Path, address: str | None = None, *, heartbeats: float = MISSED) -> Iterator[Teams]:
    """A lighthouse, unless there is one; what still runs at the end is killed."""
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed; it has wheels for Python 3.11 to 3.13")
    forkserver_context()
    light = None if address is not None else lighthouse(heartbeats=heartbeats)
    run = Teams(address or address_of(light), folder)
    try:
        yield run
    finally:
        for team in run.started:
            team.kill()
        if light is not None:
            light.shutdown()


def run_teams(
    folder: Path, function: Callable[..., None], num_teams: int, size: int, *arguments: Any, runs: int, **variables: str
) -> None:
    """Start teams, and wait for them. They train several runs, one after the other; the last argument of `function` is
    the address of a lighthouse for each, since that of the last run does not yet miss who has left."""
    with ExitStack() as stack:
        each = [stack.enter_context(teams(folder, heartbeats=NEVER_MISSED)) for _ in range(runs)]
        for number in range(num_teams):
            each[0].start(function, number, size, *arguments, [run.address for run in each], **variables)
        each[0].finish()


def lighthouse(port: int = 0, heartbeats: float = MISSED) -> Any:
    os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
    from torchft.coordination import LighthouseServer

    return LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=int(TIMEOUT * 1000),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(heartbeats * 1000),
    )


def serve_lighthouse(port: int) -> None:
    """A lighthouse in this process, until it is killed."""
    light = lighthouse(port)
    signal.pause()
    light.shutdown()


def address_of(light: Any) -> str:
    return f"http://127.0.0.1:{urlsplit(light.address()).port}"


def _main(
    function: Callable[..., None],
    place: Place,
    environment: Mapping[str, str],
    name: str,
    error: Path,
    arguments: Sequence[Any],
) -> None:
    faulthandler.register(signal.SIGUSR1, error.with_suffix(".stack").open("w"))
    os.environ |= {**environment, "RANK": str(place.rank), "WORLD_SIZE": str(place.size), "LOCAL_RANK": str(place.rank)}
    sys.stdout.flush()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.folder}/rendezvous-{name}",
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=TIMEOUT),
        )
        function(place, *arguments)
    except BaseException:
        error.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)
