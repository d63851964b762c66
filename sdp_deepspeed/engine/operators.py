"""DeepSpeed's C++ operators: one that no training uses is not compiled, and locks that builds wait for are described.

torch compiles an operator in a folder that has a file `lock` meanwhile. A run that is killed leaves it there, and every
later run waits until it is deleted.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import psutil


def do_not_build_shm() -> None:
    """Do not load DeepSpeed's all-reduce for inference on CPUs, which would be compiled in every environment and take
    66 MiB of shared memory per rank; Gloo's is used in its place."""
    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute it is PyTorch
    backend.build_shm_op = lambda: None


def find_locks() -> list[Path]:
    """Locks in the folder in which torch compiles, and in that of the programs in launch/."""
    from torch.utils.cpp_extension import get_default_build_root

    default = get_default_build_root()
    folders = {os.environ.get("TORCH_EXTENSIONS_DIR", default), f"{sys.prefix}/torch_extensions"}
    return sorted({lock for folder in folders for depth in ("*", "*/*") for lock in Path(folder).glob(f"{depth}/lock")})


def describe_lock(lock: Path) -> str:
    """Who has a lock, and what to do."""
    for process in psutil.process_iter(["open_files"]):
        if any(file.path == str(lock.resolve()) for file in process.info["open_files"] or ()):
            adam = '; "torch_adam": true in optimizer.params needs no compiler' if "adam" in lock.parent.name else ""
            return f"process {process.pid} compiles it, once, for minutes (lock {lock}){adam}"
    return f"no process here has {lock} open, which a killed run leaves and all runs wait for; delete it"
