"""File descriptors: gloo has a connection from every rank to every other, and each rank has two to the store."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

OF_A_GROUP = 4  # beside a connection to each other rank
# For what comes later: files of checkpoints and data, the backend's own connections, libraries.
RESERVE = 512


def needed_descriptors(num_ranks: int) -> int:
    """What a gloo group of all ranks takes of a process: 515 for 512 ranks.

    A run over NCCL has one for each engine, a run over gloo one more. Who keeps the store has as many again: from each
    rank PyTorch's own connection, and that of its signs of life (lifeline.py).
    """
    return num_ranks - 1 + OF_A_GROUP


def allow_connections(num_ranks: int, warn: Callable[[str], None], *, num_groups: int = 1) -> None:
    """Raise this process's soft limit of open files as far as an engine needs; a shell's default is often 1,024.

    Args:
        num_groups: that are to come; each kind of connections to the store counts as one.
        warn: told where the hard limit is lower than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_open() + num_groups * needed_descriptors(num_ranks) + RESERVE
    _allow_agent(num_ranks)
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


def _allow_agent(num_ranks: int) -> None:
    """Raise that of torchrun's agent, which keeps the store for its ranks and is not asked by anybody else; where it
    cannot take a connection, the rank tries again and again for minutes."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("RANK") != "0":
        return
    wanted = 2 * needed_descriptors(num_ranks) + RESERVE
    with contextlib.suppress(OSError, ValueError):  # the agent has another user, or a hard limit below that
        soft, hard = resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (wanted, hard))


def num_open() -> int:
    """Files and connections of this process."""
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.is_dir() else 64
