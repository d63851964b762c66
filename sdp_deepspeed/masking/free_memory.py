"""How much memory is left where a rank's tensors live: on its device, or on a machine that it shares with others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from sdp_deepspeed.atomic_files import regular

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# Of a container or a batch job, by version: the limit, what is used, and what of that the kernel takes back (files).
_LIMIT_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class FreeMemory:
    """Bytes that are left.

    Args:
        pool: names the memory; ranks with the same name share it.
        shared: left for all who share the pool.
        own: what only this process can use: its allocator has reserved it and does not use it.
        total: of the pool.
    """

    pool: str
    shared: int
    own: int
    total: int


def free_memory(device: torch.device) -> FreeMemory | None:
    """Of the device, or of the host if it is a CPU; None where nobody tells."""
    if device.type == "cpu":
        return _of_host()
    try:
        shared, total = torch.accelerator.get_memory_info(device)
        own = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError, AttributeError):  # a kind of device that does not say
        return None
    return FreeMemory(f"{socket.gethostname()} {_name(device)}", int(shared), int(own), int(total))


def _name(device: torch.device) -> str:
    """The same in all processes, whatever number they know the device by."""
    if device.type != "cuda":
        return str(device)
    return str(torch.cuda.get_device_properties(device).uuid)


def _of_host() -> FreeMemory:
    memory = psutil.virtual_memory()
    shared, total = memory.available, memory.total
    for left, limit in _limits():
        shared, total = min(shared, left), min(total, limit)
    return FreeMemory(f"{socket.gethostname()} host memory", shared, 0, total)


def _limits() -> Iterator[tuple[int, int]]:
    """Of each of this process's control groups that has a limit: what is left of it, and the limit."""
    for top, limit_file, used_file, files_key in _LIMIT_FILES:
        for folder in _own_folders(top):
            try:
                limit = int(regular(folder / limit_file).read_text())
                used = int(regular(folder / used_file).read_text())
                counts = dict(line.split() for line in regular(folder / "memory.stat").read_text().splitlines())
                yield max(0, limit - used + int(counts.get(files_key, 0))), limit
            except (OSError, ValueError):  # no such folder here, or no limit ("max")
                continue


def _own_folders(top: str) -> Iterator[Path]:
    """The folder of this process's control group and those above it; in a container often the root alone is there."""
    try:
        lines = [line.split(":", 2) for line in regular(_OWN_CGROUPS).read_text().splitlines()]
    except OSError:
        return
    for path in (Path(path) for _, kinds, path in lines if top in kinds.split(",")):
        for own in (path, *path.parents):
            yield _CGROUPS / top / own.relative_to("/")
