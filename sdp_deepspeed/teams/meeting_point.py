"""Where teams meet: torchft's lighthouse, a store, and a process group of ranks r of the teams that have come."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch.distributed as dist

from sdp_deepspeed.teams.attendance import Attendance, Member

logger = logging.getLogger("sdp_deepspeed")
T = TypeVar("T")

HEARTBEAT = 0.5  # seconds between two heartbeats; the lighthouse by default misses a team after 5
CONNECT = timedelta(seconds=10)  # for teams that are here, to connect; one of them may have died just now
RETRY = 1.0  # seconds before the next try
SETTLE = 3.0  # seconds, in which a lighthouse that was started again hears the heartbeats of all teams
REMIND = 30.0  # seconds after which a wait is logged, again and again


class MeetingPoint:
    """One rank's connections to other teams. Rank 0 of a team talks to the lighthouse.

    Args:
        address: of the lighthouse, such as "http://10.0.0.1:29510".
        is_first: whether this is rank 0 of the team.
        exchange_timeout: seconds without progress, after which an exchange fails.
    """

    def __init__(self, address: str, team: int, *, is_first: bool, exchange_timeout: float) -> None:
        self.identity = f"team{team}:{uuid.uuid4()}"
        self._address, self._timeout = address, timedelta(seconds=exchange_timeout)
        self._host = _address_towards(address)
        self._server: dist.TCPStore | None = None
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        self._group: Any = None  # a gloo group that torch.distributed does not know
        self._decisions: dist.Store | None = None
        self._lighthouse: Any = None
        self._was_lost = False
        self.group_name = ""
        if is_first:
            self._server = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            self._heart = threading.Thread(target=self._beat, daemon=True, name="sdp heartbeat")
            self._heart.start()
            atexit.register(self.leave)  # a thread in torchft's client must not be there when the interpreter ends

    @property
    def store(self) -> str:
        """Address of the store of this rank."""
        return "" if self._server is None else f"{self._host}:{self._server.port}"

    def gather(self, member: Member, whom: str, timeout: float) -> list[Member]:
        """Wait until the lighthouse has a quorum with this team, on rank 0.

        Args:
            whom: the others, for the log.

        Raises:
            TimeoutError: the lighthouse is not reachable, or too few of the teams that it knows have come.
        """
        end = time.monotonic() + timeout
        with reminder(f"team {member.team} waits for {whom}, at the lighthouse {self._address}"):
            while True:
                try:
                    if self._lighthouse is None:
                        self._lighthouse = _client(self._address)
                        if self._was_lost:
                            time.sleep(SETTLE)
                    quorum = self._lighthouse.quorum(
                        self.identity,
                        timedelta(seconds=max(end - time.monotonic(), RETRY)),
                        address=self._host,
                        store_address=member.store,
                        step=0,
                        world_size=1,
                        shrink_only=False,
                        data=member.to_json(),
                    )
                    return [Member.from_json(found.data) for found in quorum.participants if found.data]
                except (RuntimeError, TimeoutError) as error:  # a connection does not survive the lighthouse
                    self._lighthouse, self._was_lost = None, True
                    if time.monotonic() + RETRY > end:
                        raise TimeoutError(
                            f"no meeting at the lighthouse {self._address} within {timeout:.0f} s ({error}); check it, "
                            f"and {whom}"
                        ) from None
                    time.sleep(RETRY)

    def connect(self, attendance: Attendance, rank: int) -> Any:
        """The process group of ranks with this number in all teams that are here, in the order of teams."""
        names = {member.group for member in attendance.members}
        count = len(attendance.members)
        if self._group is None or names != {self.group_name} or self._group.size() != count:
            self.disconnect()
            self._group, self._decisions = _within(2 * CONNECT, lambda: self._connect(attendance, rank))
            self.group_name = attendance.identity
        return self._group

    def _connect(self, attendance: Attendance, rank: int) -> tuple[Any, dist.Store]:
        """Group and store of those that are here."""
        host, port = attendance.members[0].store.rsplit(":", 1)
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=CONNECT)
        index = [member.identity for member in attendance.members].index(self.identity)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = CONNECT
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        places = [{"interface": name} for name in interfaces] or [{"hostname": self._host}]
        options._devices = [dist.ProcessGroupGloo.create_device(**place) for place in places]
        prefixed = dist.PrefixStore(f"{attendance.identity}/{rank}", store)
        group = dist.ProcessGroupGloo(prefixed, index, len(attendance.members), options)
        group.set_timeout(self._timeout)
        return group, store

    def disconnect(self) -> None:
        """Close the group, so that others that wait in it fail at once."""
        if self._group is not None:
            self._group.abort()
        self._group, self.group_name = None, ""

    def decide(self, name: str, counts: bool) -> bool:
        """Whether the meeting with this name counts: the first rank of all teams decides.

        Raises:
            RuntimeError: the store is lost, and with it the decision.
        """
        store = self._decisions
        assert store is not None
        decision = _within(CONNECT, lambda: store.compare_set(f"counts/{name}", "", str(counts)))
        return bool(decision == b"True")

    def leave(self) -> None:
        """Stop the heartbeats: the others wait no more for this team."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()
            atexit.unregister(self.leave)
        self.disconnect()

    def _beat(self) -> None:
        client: Any = None
        while not self._stop.wait(HEARTBEAT):
            try:
                client = client or _client(self._address)
                client.heartbeat(self.identity, timedelta(seconds=5))
            except (RuntimeError, TimeoutError):
                client = None


def _within(limit: timedelta, call: Callable[[], T]) -> T:
    """The result of a call to a store, which has no time limit of its own if the process with the store is stopped.

    Raises:
        RuntimeError: the call fails, or takes longer.
    """
    results: list[T | Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if not results:
        raise RuntimeError(f"the store of another team has not answered for {limit.total_seconds():.0f} s")
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def _client(address: str) -> Any:
    from torchft.coordination import LighthouseClient

    return LighthouseClient(address, CONNECT)


def _address_towards(address: str) -> str:
    """Address of this machine on the way to a server."""
    parts = urlsplit(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no way to the lighthouse {address} ({error}); check TORCHFT_LIGHTHOUSE") from None


@contextmanager
def reminder(text: str) -> Iterator[None]:
    """Log a text every `REMIND` seconds while the context is active."""
    done = threading.Event()
    begin = time.monotonic()

    def remind() -> None:
        while not done.wait(REMIND):
            logger.warning("%s, since %.0f s", text, time.monotonic() - begin)

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()
