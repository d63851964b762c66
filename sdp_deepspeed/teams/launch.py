"""`sdp teams`: a lighthouse and all teams of a run on this machine, for a trial and for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO
from urllib.parse import urlsplit

import torch

from sdp_deepspeed.teams.join import LIGHTHOUSE, NUMBER, check_torchft

_DEVICES = "CUDA_VISIBLE_DEVICES"
_POLL = 0.1  # seconds
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL


@dataclass
class _LocalTeam:
    """The processes of a team.

    Args:
        store: where its ranks meet, as `torchrun` provides it.
        printers: threads that print the output of each rank.
    """

    number: int
    ranks: list[subprocess.Popen[str]]
    store: Any
    printers: list[threading.Thread]
    ended: float | None = None  # when its first rank ended with an error

    def poll(self) -> int | None:
        """Exit code of the team if all ranks have ended. If one fails, the others are ended."""
        codes = [rank.poll() for rank in self.ranks]
        if any(codes) and self.ended is None:
            self.ended = time.monotonic()
            self.signal(signal.SIGTERM)
        if self.ended is not None and time.monotonic() > self.ended + _GRACE:
            self.signal(signal.SIGKILL)
        if None in codes:
            return None
        for printer in self.printers:
            printer.join(1.0)  # processes that a killed rank has left may keep its output open
        return min(codes, key=lambda code: (code == 0, code == -signal.SIGTERM))  # why it ended comes first

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.send_signal(number)


def run_teams(num_teams: int, num_ranks: int, command: Sequence[str]) -> int:
    """Run a Python program as so many teams of so many ranks, until all have ended. Output is prefixed with the team.

    Returns:
        0, or 1 if a team has failed; the others go on without it.
    """
    check_torchft()
    os.environ.setdefault("RUST_LOG", "warn")  # read when torchft is imported
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="0.0.0.0:0", min_replicas=1, join_timeout_ms=600_000, quorum_tick_ms=100)
    address = f"http://127.0.0.1:{urlsplit(lighthouse.address()).port}"
    print(f"sdp teams: {LIGHTHOUSE}={address}, {num_teams} teams of {num_ranks} ranks", flush=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the teams, too
    visible = _visible_devices(num_teams, num_ranks)
    running: list[_LocalTeam] = []
    failed = False
    try:
        for number, devices in enumerate(visible):
            _start(running, number, num_ranks, address, command, devices)
            if devices:
                print(f"sdp teams: team {number} has {_DEVICES}={devices[_DEVICES]}", flush=True)
        while running:
            for team in list(running):
                if (code := team.poll()) is not None:
                    running.remove(team)
                    failed |= code != 0
                    print(f"sdp teams: team {team.number} ended with {code}", flush=True)
            time.sleep(_POLL)
    finally:
        for team in running:
            team.signal(signal.SIGKILL)
        lighthouse.shutdown()
        signal.signal(signal.SIGTERM, before)
    return int(failed)


def _visible_devices(num_teams: int, num_ranks: int) -> list[dict[str, str]]:
    """The variable that gives each team GPUs of its own; none if there are too few for all ranks."""
    count = torch.cuda.device_count()
    if count < num_teams * num_ranks:
        if count:
            print(f"sdp teams: {count} GPUs are too few for all ranks, so all teams see all of them", flush=True)
        return [{}] * num_teams
    devices = [name for name in os.environ.get(_DEVICES, "").split(",") if name] or [str(n) for n in range(count)]
    return [{_DEVICES: ",".join(devices[n * num_ranks : (n + 1) * num_ranks])} for n in range(num_teams)]


def _start(
    running: list[_LocalTeam],
    number: int,
    num_ranks: int,
    address: str,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Start a team, and append it to those that are running."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "OMP_NUM_THREADS": "1",  # as torchrun: all ranks share the cores of this machine
        **os.environ,
        **environment,
        NUMBER: str(number),
        LIGHTHOUSE: address,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in this process
    }
    team = _LocalTeam(number, [], store, [])
    running.append(team)  # before a rank may fail to start
    for rank in range(num_ranks):
        process = subprocess.Popen(
            [sys.executable, "-u", *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        team.ranks.append(process)
        assert process.stdout is not None
        prefix = f"[team {number}]" if num_ranks == 1 else f"[team {number}.{rank}]"
        team.printers.append(threading.Thread(target=_print_lines, args=(prefix, process.stdout), daemon=True))
        team.printers[-1].start()


def _print_lines(prefix: str, output: TextIO) -> None:
    for line in output:
        print(f"{prefix} {line}", end="", flush=True)
