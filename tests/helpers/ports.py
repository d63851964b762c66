"""Ports for programs that tests start: what the system hands to a connection meanwhile is none of them."""

from __future__ import annotations

import os
import random
import socket

_FIRST, _LAST = 12000, 32000  # Linux hands out 32768 and above
_PER_WORKER = 1000


def free_port() -> int:
    """A port of this machine that nothing uses, and no other test worker takes."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + worker * _PER_WORKER % (_LAST - _FIRST)
    for port in random.sample(range(first, first + _PER_WORKER), _PER_WORKER):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"all ports from {first} to {first + _PER_WORKER} are in use")
