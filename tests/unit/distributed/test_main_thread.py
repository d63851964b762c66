"""Another thread sees in which collective of all ranks the main thread waits."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed.main_thread import _COLLECTIVES, stuck_in

WORLD, SOME = object(), object()


def all_gather(group: object = None) -> list[str]:
    """As PyTorch's: wrapped, and it waits further down."""
    return seen()


@wraps(all_gather)
def wrapped(*args: Any, **options: Any) -> list[str]:
    return all_gather(*args, **options)


def not_called() -> None:
    """Another collective."""


CALLS = dict.fromkeys(_COLLECTIVES, not_called) | {"all_gather": wrapped}
HOST = SimpleNamespace(**CALLS, group=SimpleNamespace(WORLD=WORLD))


def seen() -> list[str]:
    """What another thread sees now."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(stuck_in(HOST)))
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize(("group", "expected"), [(None, "all_gather"), (WORLD, "all_gather"), (SOME, "")])
def test_a_collective_of_all_ranks_is_seen(group: object, expected: str) -> None:
    assert wrapped(group) == [expected]
    assert seen() == [""]


@pytest.mark.parametrize("name", _COLLECTIVES)
def test_pytorch_calls_the_group_so(name: str) -> None:
    assert "group" in inspect.unwrap(getattr(dist, name)).__code__.co_varnames


@pytest.mark.parametrize("enabled", [False, True])
def test_garbage_is_not_collected_while_threads_are_listed(enabled: bool) -> None:
    """A finalizer there may lock all threads for ever; afterward it is as the user wanted."""
    found: list[bool] = []

    def frames() -> dict[int, Any]:
        found.append(gc.isenabled())
        return {}

    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with mock.patch.object(sys, "_current_frames", frames):
            stuck_in(HOST)
        assert (found, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if was_enabled else gc.disable)()
