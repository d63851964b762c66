"""Threads that stand for ranks, over gloo: one process group object per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from sdp_deepspeed.distributed.communicator import Communicator

TIMEOUT = timedelta(seconds=240)


class ThreadGroup:
    """The functions of `torch.distributed` that `Communicator` calls, for one thread; remembers what it sent."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        self.sent: list[int] = []

    def get_rank(self, group: None) -> int:
        return self._group.rank()

    def get_world_size(self, group: None) -> int:
        return self._group.size()

    def all_to_all_single(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        out_splits: list[int],
        in_splits: list[int],
        *,
        group: None,
        async_op: Literal[True],
    ) -> Any:
        assert received.is_contiguous()
        assert sent.is_contiguous()
        assert received.numel() == 0 or received.data_ptr() != sent.data_ptr()
        self.sent.append(sent.numel())
        return self._group.alltoall_base(received, sent, out_splits, in_splits, dist.AllToAllOptions())


class Ranks:
    """Threads that stand for ranks; made once, since connecting them is what takes time."""

    def __init__(self, size: int) -> None:
        self.groups: list[Any] = [None] * size
        store = dist.HashStore()
        in_threads(lambda rank: self.groups.__setitem__(rank, ThreadGroup(store, rank, size)), size)

    def run(self, work: Callable[[Communicator], Any]) -> list[Any]:
        """Results by rank; the first rank's error is raised."""
        for group in self.groups:
            group.sent.clear()
        return in_threads(lambda rank: work(Communicator(self.groups[rank])), len(self.groups))


def in_threads(work: Callable[[int], Any], size: int) -> list[Any]:
    """Results of `work(rank)`, each in a thread; the error of the rank that failed first is raised."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=2 * TIMEOUT.total_seconds())
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for error in errors:
        raise error
    return results
