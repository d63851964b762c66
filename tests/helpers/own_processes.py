"""Programs of this package that this process has started, and that are alive."""

from __future__ import annotations

import psutil


def own_processes(module: str) -> list[psutil.Process]:
    """Children that run `python -m <module>`."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if module in child.cmdline()]
