"""DeepSpeed's C++ operators: the one that no training uses is not compiled, and a long wait for another is explained.

torch compiles an operator in a folder that has a file `lock` meanwhile. A run that is killed leaves it there, and every
later run waits until it is deleted.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

logger = logging.getLogger("sdp_deepspeed")

PATIENCE = 30.0  # seconds of loading an operator before it is explained


def patch_operators() -> None:
    """Do not load DeepSpeed's all-reduce for inference on CPUs, which would be compiled in every environment and take
    66 MiB of shared memory per rank; Gloo's is used in its place. Explain what takes long in loading others."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute it is PyTorch
    load = OpBuilder.jit_load
    if hasattr(load, "__wrapped__"):  # patched already
        return

    @wraps(load)
    def jit_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        timer = threading.Timer(PATIENCE, _explain, [self.name])
        timer.daemon = True
        timer.start()
        try:
            return load(self, *args, **kwargs)
        finally:
            timer.cancel()

    OpBuilder.jit_load = jit_load
    backend.build_shm_op = lambda: None


def _explain(name: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for lock in find_locks():
            if lock.parent.name == name:
                logger.warning("DeepSpeed loads its operator %s: %s", name, describe_lock(lock))


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
