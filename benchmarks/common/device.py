"""The device that is there, as DeepSpeed chooses it (DS_ACCELERATOR decides), and a clock that waits for it."""

from __future__ import annotations

import ctypes
import os
import time

import torch
from deepspeed.accelerator import get_accelerator

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)


def device() -> torch.device:
    """This rank's."""
    return torch.device(get_accelerator().current_device_name())


def backend() -> str | None:
    """Of collectives; None is the one that DeepSpeed takes for the device."""
    return "gloo" if get_accelerator().device_name() == "cpu" else None


def take_device() -> None:
    """Before the first collective: each rank on a device of its own."""
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))


def keep_freed_memory() -> None:
    """On a CPU, keep freed memory in the process, as PyTorch's allocator does on a GPU. glibc would return some of it
    after each step, and the next step would spend a few percent of its time on page faults."""
    if get_accelerator().device_name() == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def seconds() -> float:
    """A time, once everything that was started on the device is done."""
    get_accelerator().synchronize()
    return time.perf_counter()


def device_name() -> str:
    """Of the GPU, or "CPU", whose name is in the provenance."""
    return torch.cuda.get_device_name() if device().type == "cuda" else device().type.upper()
