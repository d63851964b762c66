"""One rank of a world whose other ranks are not there, with real engines: its shapes, its memory, the time of its work.

PyTorch's fake backend makes the group: collectives return at once, and what they receive is anything (mostly copies of
what this rank sends). What ranks of this package tell each other at start is echoed, as if all others said the same. So
no value means anything, and nothing may be concluded about the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm

from benchmarks.common.device import take_device
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.host_group import HostChannel, HostGroup
from sdp_deepspeed.distributed.store_gatherer import StoreGatherer


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """The default group in the block; no other one may be there."""
    # Registers the backend. All of the module's names are private, and this is what PyTorch's documents import too.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {name: str(value) for name, value in names.items()}))
        stack.enter_context(_echoes())
        take_device()
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=size)
        stack.callback(dist.destroy_process_group)
        deepspeed_comm.init_distributed("fake", verbose=False)  # takes the group that is there
        yield


@contextmanager
def _echoes() -> Iterator[None]:
    """Whatever an engine of this package would ask other processes is answered here. By functions: a mock would keep
    the engines that it was called with."""
    from sdp_deepspeed.engine import deepspeed_settings, engine

    def echo(self: Any, value: object) -> list[Any]:
        return [value] * self.size

    def multiplied(self: Communicator, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(self.size)

    def nothing(*_: Any) -> None:
        return None

    def host_group(of: Any, *_: Any) -> HostGroup:
        return HostGroup(of, of.group.WORLD)

    with (
        mock.patch.object(StoreGatherer, "gather_objects", echo),
        mock.patch.object(HostChannel, "gather_objects", echo),
        mock.patch.object(HostChannel, "is_gone", nothing),
        mock.patch.object(Communicator, "sum", multiplied),  # numbers of passes are compared by it
        mock.patch.object(engine, "make_host_group", host_group),
        mock.patch.object(engine, "watch_ranks", nothing),  # signs of life that nobody gives
        mock.patch.object(deepspeed_settings, "take_limit_of_the_run", nothing),  # the fake group has none
    ):
        yield
