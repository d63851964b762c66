"""One rank of a world whose other ranks are not there, with real engines: its shapes, its memory, the time of its work.

PyTorch's fake backend makes all groups: collectives return at once, and what they receive is anything (mostly copies of
what this rank sends). What engines of this package tell each other is echoed, as if all others said the same. So no
value means anything, and nothing may be concluded about the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from deepspeed import comm as deepspeed_comm

from benchmarks.common.device import take_device


class _EchoStore:
    """A store in which all ranks say of themselves what this one says."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size, self._store = rank, size, dist.HashStore()

    def set(self, key: str, value: str) -> None:
        prefix, _, own = key.rpartition("/")
        for other in range(self._size) if own == str(self._rank) else [own]:
            self._store.set(f"{prefix}/{other}" if prefix else key, value)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount * self._size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """The default group in the block; no other one may be there."""
    # Registers the backend. All of the module's names are private, and this is what PyTorch's documents import too.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    new_group = dist.new_group

    def fake_group(*arguments: Any, **options: Any) -> Any:
        return new_group(*arguments, **options | {"backend": "fake"})

    store = _EchoStore(rank, size)

    def get_group_store(_: dist.ProcessGroup) -> Any:
        return store

    def echo(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = [value] * len(found)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}))
        # Functions: a mock would keep the engines that it was called with.
        stack.enter_context(mock.patch.object(dist, "new_group", fake_group))
        stack.enter_context(mock.patch.object(dist.distributed_c10d, "new_group", fake_group))  # for new_subgroups
        stack.enter_context(mock.patch.object(dist, "all_gather_object", echo))
        stack.enter_context(mock.patch.object(dist.ProcessGroup, "get_group_store", get_group_store))
        take_device()
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
        stack.callback(dist.destroy_process_group)
        deepspeed_comm.init_distributed("fake", verbose=False)  # takes the group that is there
        yield
