"""Another thread sees whether the main thread waits in a barrier of all ranks."""

from __future__ import annotations

import inspect
import threading
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed.main_thread import is_in_barrier

WORLD, SOME = object(), object()


def barrier(group: object = None) -> list[bool]:
    """As PyTorch's: wrapped, and it waits further down."""
    return seen()


@wraps(barrier)
def wrapped(*args: Any, **options: Any) -> list[bool]:
    return barrier(*args, **options)


HOST = SimpleNamespace(barrier=wrapped, group=SimpleNamespace(WORLD=WORLD))


def seen() -> list[bool]:
    """What another thread sees now."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_in_barrier(HOST)))
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize(("group", "expected"), [(None, True), (WORLD, True), (SOME, False)])
def test_a_barrier_of_all_ranks_is_seen(group: object, expected: bool) -> None:
    assert wrapped(group) == [expected]
    assert seen() == [False]


def test_pytorch_calls_the_group_so() -> None:
    assert "group" in inspect.unwrap(dist.barrier).__code__.co_varnames
