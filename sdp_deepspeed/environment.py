"""Versions, devices and builds of DeepSpeed's C++ operators that runs wait for, for a bug report.

torch compiles an operator in a folder that has a file `lock` meanwhile. A run that is killed leaves it there, and every
later run waits until it is deleted.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from sdp_deepspeed.version import __version__

_PACKAGES = "torch deepspeed accelerate transformers datasets safetensors pydantic numpy typer torchft"


def describe_environment() -> Iterator[str]:
    """Yield lines of name and value."""
    yield f"sdp_deepspeed  {__version__}"
    yield f"python         {platform.python_version()}, {platform.platform()}"
    for name in _PACKAGES.split():
        try:
            yield f"{name:<14} {version(name)}"
        except PackageNotFoundError:
            yield f"{name:<14} not installed"
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(torch.distributed, f"is_{name}_available")()]
    yield f"backends       {', '.join(backends)}"
    yield f"CUDA           {torch.version.cuda or 'not built in'}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"GPU {index}          {device.name}, {device.total_memory / 2**30:.1f} GiB"
    for lock in _find_locks():
        yield f"operator       {lock.parent.name}: {_describe_lock(lock)}"


def _find_locks() -> list[Path]:
    """Locks in the folder in which torch compiles, and in that of the programs in launch/."""
    from torch.utils.cpp_extension import get_default_build_root

    default = get_default_build_root()
    folders = {os.environ.get("TORCH_EXTENSIONS_DIR", default), f"{sys.prefix}/torch_extensions"}
    return sorted({lock for folder in folders for depth in ("*", "*/*") for lock in Path(folder).glob(f"{depth}/lock")})


def _describe_lock(lock: Path) -> str:
    """Who has a lock, and what to do."""
    for process in psutil.process_iter(["open_files"]):
        if any(file.path == str(lock.resolve()) for file in process.info["open_files"] or ()):
            adam = '; "torch_adam": true in optimizer.params needs no compiler' if "adam" in lock.parent.name else ""
            return f"process {process.pid} compiles it, once, for minutes (lock {lock}){adam}"
    return f"no process here has {lock} open, which a killed run leaves and all runs wait for; delete it"
