"""Who has a folder, as its lock says it (folder_lock.py)."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@cache
def machine() -> str:
    """This machine since it was started: processes of another one are not to be seen from here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class Owner:
    """Who has a folder.

    Args:
        machine: see `machine`.
        since: local time.
        job: its command.
    """

    host: str
    pid: int
    machine: str
    since: str
    job: str

    @classmethod
    def here(cls) -> Owner:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(socket.gethostname(), os.getpid(), machine(), since, shlex.join(sys.orig_argv)[:500])

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """None where nobody has written, or not to the end."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since} ({self.job})"
