"""Threads of gloo at the end of a process.

A thread of gloo's that has done its part of a collective lets go of the tensors a moment after those who wait for it go
on. If they are the last to hold a tensor, freeing it takes Python's lock, and a thread that asks for it while the
interpreter ends aborts the process ("terminate called without an active exception"): a program whose last act is a
collective fails after everything was done.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_NAME = "pt_gloo_runloop"  # as PyTorch calls them
_TASKS = Path("/proc/self/task")
_PAUSE_SECONDS = 0.005
_LIMIT_SECONDS = 5.0


@cache
def settle_at_exit() -> None:
    """Before the interpreter ends, let gloo's threads come to rest; once in a process."""
    atexit.register(settle)


def settle(limit: float = _LIMIT_SECONDS) -> bool:
    """Wait without Python's lock until no thread of gloo's is at work; at most so many seconds.

    Two looks must find all of them asleep: one that asked for the lock wakes up when it is free.

    Returns:
        Whether they are at rest.
    """
    until, num_asleep = time.monotonic() + limit, 0
    while num_asleep < 2:
        if time.monotonic() > until:
            return False
        time.sleep(_PAUSE_SECONDS)
        num_asleep = 0 if any(state != "S" for state in _states()) else num_asleep + 1
    return True


def _states() -> Iterator[str]:
    """Of gloo's threads, as the kernel writes them: S for asleep."""
    for task in os.listdir(_TASKS) if _TASKS.is_dir() else ():
        try:
            name, _, rest = (_TASKS / task / "stat").read_text("utf-8", "replace").partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        if name == _NAME:
            yield rest.split()[0]
