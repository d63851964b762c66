"""File descriptors: gloo has a connection from every rank to every other."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

OF_A_GROUP = 4  # beside a connection to each other rank
# For what comes later: files of checkpoints and data, the backend's own connections, libraries.
RESERVE = 512


def needed_descriptors(num_ranks: int) -> int:
    """What a gloo group of all ranks takes of a process: 515 for 512 ranks.

    A run over NCCL has one for each engine, a run over gloo one more. The rank that keeps the store has a connection
    from each rank to it, too.
    """
    return num_ranks - 1 + OF_A_GROUP


def allow_connections(num_ranks: int, warn: Callable[[str], None], *, num_groups: int = 1) -> None:
    """Raise this process's soft limit of open files as far as an engine needs; a shell's default is often 1,024.

    Args:
        num_groups: that are to come; the store counts as one.
        warn: told where the hard limit is lower than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_open() + num_groups * needed_descriptors(num_ranks) + RESERVE
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        warn(
            f"{num_ranks} ranks may need {wanted} open files in a process (one connection from each to every other, "
            f"{RESERVE} for all else), and the hard limit is {hard}: raise it on all nodes (ulimit -Hn, or nofile in "
            "/etc/security/limits.conf)"
        )
        wanted = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_open() -> int:
    """Files and connections of this process."""
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.is_dir() else 64
