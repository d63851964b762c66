"""A process ends when gloo's threads are at rest, and not before."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
import time
from collections.abc import Callable

import pytest

from sdp_deepspeed.distributed import gloo_threads
from sdp_deepspeed.distributed.gloo_threads import settle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="states of threads are read from /proc")

_PR_SET_NAME = 15


def started(work: Callable[[], None], name: str = gloo_threads._NAME) -> threading.Thread:
    """A thread that the kernel knows by a name, at work."""
    begun = threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        begun.set()
        work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    return thread


def busy(done: threading.Event, seconds: float = 0.3) -> Callable[[], None]:
    """At work without Python's lock, for the most part; then it asks for the lock once more."""

    def work() -> None:
        data, until = bytes(1 << 22), time.monotonic() + seconds
        while time.monotonic() < until:
            hashlib.sha256(data)
        done.set()

    return work


@pytest.mark.slow
def test_a_thread_at_work_is_waited_for() -> None:
    done = threading.Event()
    started(busy(done))
    assert settle()
    assert done.is_set()


@pytest.mark.slow
def test_a_thread_that_never_rests_is_given_up() -> None:
    done = threading.Event()
    started(busy(done, seconds=2.0))
    assert not settle(0.1)
    assert not done.is_set()
    done.wait()


@pytest.mark.slow
def test_threads_of_others_and_threads_at_rest_do_not_count() -> None:
    done, released = threading.Event(), threading.Event()
    started(busy(done, seconds=2.0), name="another")
    started(released.wait)  # type: ignore[arg-type]
    assert settle()
    assert not done.is_set()
    released.set()
    done.wait()
