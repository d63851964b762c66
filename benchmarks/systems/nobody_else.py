"""A world of many ranks of which only one is there: collectives return at once, and the store says that all others did
and said what this one did. For what a rank does by itself; no value that it receives means anything."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sdp_deepspeed.distributed.host_group import HostChannel
from sdp_deepspeed.engine import deepspeed_settings

RANK = 3  # neither first nor last
_STORES: list[dist.Store] = []  # torch keeps their C++ halves only


class EchoStore(FakeStore):
    """Keys that end with a rank have this one's value, and whoever is waited for has come."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self._values[_own(key)] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._values[_own(key)]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]

    def check(self, keys: list[str]) -> bool:
        return all(_own(key) in self._values or re.search(r"/all \w+$", key) for key in keys)

    def wait(self, keys: list[str], *_timeout: object) -> None:
        """For nobody."""


def _own(key: str) -> str:
    return re.sub(r"/\d+$", f"/{RANK}", key)


def enter_world(num_ranks: int) -> None:
    """Be one of so many, on the CPU; once in a process, as DeepSpeed keeps its groups."""
    os.environ |= {"RANK": str(RANK), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # nobody connects
    _STORES.append(EchoStore())
    dist.init_process_group("fake", rank=RANK, world_size=num_ranks, store=_STORES[-1])
    deepspeed.init_distributed("fake")
    dist.new_group = partial(_new_group, dist.new_group)
    HostChannel.gather_objects = _echo  # type: ignore[method-assign,assignment]
    deepspeed_settings.take_limit_of_the_run = lambda *_: None  # it has none


def _new_group(new_group: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Over nothing, whatever was asked for."""
    return new_group(*arguments, **options | {"backend": "fake"})


def _echo(channel: HostChannel, value: object) -> list[Any]:
    """Its messages go through gloo's own calls, which would wait."""
    return [value] * channel.size
