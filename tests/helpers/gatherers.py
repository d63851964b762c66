"""Threads that stand for ranks and only gather objects: what agreement needs, without a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT = 240.0


class ThreadGatherer:
    """One thread's `gather_objects` in a group of threads.

    Attributes:
        num_gatherings: how often this rank took part.
    """

    def __init__(self, rank: int, values: list[Any], meeting: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(values)
        self.num_gatherings = 0
        self._values = values
        self._meeting = meeting

    def gather_objects(self, value: object) -> list[Any]:
        self.num_gatherings += 1
        self._values[self.rank] = value
        self._meeting.wait()
        everyone = list(self._values)
        self._meeting.wait()
        return everyone


def outcomes_of(num_ranks: int, run: Callable[[int, ThreadGatherer], Any]) -> list[Any]:
    """Run `run(rank, gatherer)` in a thread per rank; each one's result or exception."""
    values: list[Any] = [None] * num_ranks
    meeting = threading.Barrier(num_ranks, timeout=TIMEOUT)

    def rank_main(rank: int) -> Any:
        try:
            return run(rank, ThreadGatherer(rank, values, meeting))
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank_main, range(num_ranks)))


class Alone:
    """What `Communicator` asks of `torch.distributed`, for one rank."""

    def get_rank(self, group: None) -> int:
        return 0

    def get_world_size(self, group: None) -> int:
        return 1

    def all_gather_object(self, values: list[object], value: object, group: None) -> None:
        values[0] = value
