"""A barrier that does not wait for a rank that will not join, because it continues training or makes another call."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from sdp_deepspeed.messages import listed
from sdp_deepspeed.parallel.groups import default_store

logger = logging.getLogger("sdp_deepspeed")

PATIENCE = 30.0  # seconds that a rank waits for others before it warns


class CallBarrier:
    """Barriers for calls that all ranks must make, such as saving a checkpoint.

    If a rank has recorded that it continues training, it will not join, and a waiting rank raises an error that names
    it, long before a timeout. Ranks that have not arrived after `PATIENCE` seconds are named in a warning.
    Communication uses the store of the default process group. All ranks construct barriers in the same order.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self._store: Any = default_store()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._name = f"sdp_deepspeed/barrier/{next(self._numbers)}"
        self._num_steps = self._num_calls = 0
        self._last_keys = list[str]()  # keys of calls that this rank deletes, once all ranks make a later one
        self._store.set(f"{self._name}/{self._rank}", "0 0")

    def record_step(self) -> None:
        """Record that this rank begins another step. The message to the store is not answered, so this takes about 15
        microseconds."""
        if self._size > 1:
            self._num_steps += 1
            self._store.set(f"{self._name}/{self._rank}", f"{self._num_calls} {self._num_steps}")

    def wait(self, what: str) -> None:
        """Wait for all ranks to make the call `what`.

        Raises:
            RuntimeError: a rank continues training, makes a different call, or does not arrive within the store's
                timeout.
        """
        if self._size == 1:
            return
        prefix = f"{self._name}/calls/{self._num_calls}"
        keys = [f"{prefix}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], what)
        self._store.add(f"{prefix}/{what}", 1)
        self._store.add(prefix, 1)
        self._wait_for_all(what, prefix, keys)
        self._num_calls += 1
        self._num_steps = 0
        for key in self._last_keys:
            self._store.delete_key(key)
        self._last_keys = [keys[self._rank]]
        self._last_keys += [prefix, f"{prefix}/{what}"] if self._rank == 0 else []
        if self._store.add(f"{prefix}/{what}", 0) < self._size:
            calls = dict.fromkeys(call.decode() for call in self._store.multi_get(keys))
            raise RuntimeError(f"ranks made different calls: {'; '.join(calls)}; make each call on all ranks together")

    def _wait_for_all(self, what: str, prefix: str, keys: Sequence[str]) -> None:
        begin, pause, has_warned = time.monotonic(), 0.001, False  # seconds
        longest_pause = 0.1 * max(1.0, self._size / 64)  # rank 0 serves the requests of all ranks
        while self._store.add(prefix, 0) < self._size:
            waited = time.monotonic() - begin
            if waited > self._store.timeout.total_seconds():
                raise RuntimeError(
                    f"{what}: rank {listed(self._absent(keys))} did not arrive within the process group's timeout; "
                    "call it on all ranks, or check that rank for an error or a hang"
                )
            if waited > PATIENCE and not has_warned:
                has_warned = True
                absent = self._absent(keys)
                if absent and self._rank == min(set(range(self._size)).difference(absent)):
                    logger.warning("%s: waiting for rank %s; call it on all ranks", what, listed(absent))
            time.sleep(pause)
            pause = min(2 * pause, longest_pause)
            if pause >= 0.1 and (ahead := self._ahead()):
                self._store.delete_key(keys[self._rank])  # the others may arrive without this rank
                self._store.add(f"{prefix}/{what}", -1)
                self._store.add(prefix, -1)
                raise RuntimeError(
                    f"{what}: rank {listed(ahead)} continued training while rank {self._rank} waits; call it on all "
                    "ranks"
                )

    def _absent(self, keys: Sequence[str]) -> list[int]:
        """Ranks that have not set their key."""
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _ahead(self) -> list[int]:
        """Ranks that have begun more steps since the last common call than this rank."""
        keys = [f"{self._name}/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):
            return []
        counts = [tuple(map(int, value.split())) for value in self._store.multi_get(keys)]
        ahead = []
        for rank, (num_calls, num_steps) in enumerate(counts):
            if num_calls == self._num_calls and num_steps > self._num_steps:
                ahead.append(rank)
        return ahead
