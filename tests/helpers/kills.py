"""A process that dies while it changes files, at a moment that is the same each time."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")  # and opening to write


def kill_at(number: int) -> None:
    """Kill this process before the `number`th time that it changes the disk, from 1."""
    counter = itertools.count(1)

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        is_change = event in CHANGES or (event == "open" and "w" in str(arguments[1]))
        if is_change and next(counter) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
