"""Another thread sees in which collective of all ranks the main thread waits."""

from __future__ import annotations

import inspect
import threading
from functools import wraps
from types import SimpleNamespace
from typing import Any

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
