"""Programs of this package that this process has started, and that are alive."""

from __future__ import annotations

import time

import psutil


def own_processes(module: str) -> list[psutil.Process]:
    """Children that run `python -m <module>`."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if module in _command(child)]


def _command(child: psutil.Process) -> list[str]:
    """Its words. The kernel tells a parent that a program begins a moment before it shows them."""
    for _ in range(100):
        if words := child.cmdline():
            return words
        time.sleep(0.01)
    return []
