"""Processes that must not outlive the one that started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.3
_SECONDS_TO_END = 5.0


def start(module: str, arguments: Sequence[str] = (), *, environment: dict[str, str] | None = None) -> Any:
    """`python -m <module>` with pipes to its stdin and from its stdout.

    A new program, no fork: a rank has threads, locks and an accelerator that a forked process would break on, and a
    spawned one would import the user's script again. It is in a session of its own, so that Ctrl-C in a terminal
    reaches the rank alone, which may want to save first.
    """
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid()), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (environment or {}),
        start_new_session=True,
    )


def end_with_parent() -> None:
    """In a program that `start` started: end at once when the process that started it is gone.

    Until then no signal ends it that a launcher or a scheduler sends to all processes of a job: the rank decides.
    """
    parent = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(0)


def stop(process: Any) -> None:
    """End one of ours, and wait for it. Its pipes last: a thread that reads one would keep it from being closed."""
    process.kill()
    process.wait(_SECONDS_TO_END)
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was to be written has no reader
            pipe.close()
