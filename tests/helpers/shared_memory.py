"""Shared memory that killed runs left: 66 MiB of each rank of DeepSpeed's launcher on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from sdp_deepspeed.engine.shared_memory import SEGMENTS


def sweep_segments() -> None:
    """Unlink this user's segments that no process has open."""
    left = [str(path) for path in Path("/").glob(f"{SEGMENTS[1:]}{os.getuid()}_*")]
    if left:
        processes = [process.info["open_files"] or [] for process in psutil.process_iter(["open_files"])]
        in_use = {file.path for files in processes for file in files}
        for path in set(left) - in_use:
            Path(path).unlink(missing_ok=True)
