"""Evaluations that are looked at: what they start, what they wait for, with how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from sdp_deepspeed.masking.free_memory import FreeMemory
from tests.helpers.training import Recording

PLENTY, LITTLE = FreeMemory("here", 2**40, 0, 2**40), FreeMemory("here", 2**20, 0, 2**40)


@contextmanager
def memory_of(found: FreeMemory | None) -> Iterator[None]:
    """So much is left; None is not known."""
    with mock.patch("sdp_deepspeed.masking.passes.free_memory", return_value=found):
        yield


def num_collectives(engine: Any, work: Callable[[], Any]) -> int:
    """That `work` starts on the data-parallel group."""
    events = Recording()
    events.watch(engine)
    work()
    engine.dp_group._dist = dist
    return len(events.events)


class Delaying:
    """`torch.distributed` whose collectives run at the last moment that is allowed: where they are waited for."""

    def __init__(self) -> None:
        self.num_running = 0
        self.most_running = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(self, received: torch.Tensor, sent: torch.Tensor, *splits: Any, **options: Any) -> Any:
        received.fill_(torch.nan)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)

        def wait(*_: Any) -> None:
            self.num_running -= 1
            dist.all_to_all_single(received, sent, *splits, **(options | {"async_op": False}))

        return mock.Mock(wait=wait)


@contextmanager
def running_layer(module: Any, number: int, times: int) -> Iterator[None]:
    """A layer that runs so many times in a pass."""
    layer = module.model.layers[number]
    plain = layer.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for _ in range(times):
            hidden = plain(hidden, *args, **kwargs)
        return hidden

    with mock.patch.object(layer, "forward", forward):
        yield
