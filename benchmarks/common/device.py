"""The device that is there, as DeepSpeed chooses it (DS_ACCELERATOR decides), and a clock that waits for it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator


def device() -> torch.device:
    """This rank's."""
    return torch.device(get_accelerator().current_device_name())


def backend() -> str | None:
    """Of collectives; None is the one that DeepSpeed takes for the device."""
    return "gloo" if get_accelerator().device_name() == "cpu" else None


def take_device() -> None:
    """Before the first collective: each rank on a device of its own."""
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))


def seconds() -> float:
    """A time, once everything that was started on the device is done."""
    get_accelerator().synchronize()
    return time.perf_counter()


def device_events(profiler: Any) -> list[Any]:
    """Kernels, copies and fills of a GPU. Torch's profiler has them beside calls of the driver, and ranges that
    somebody named, which span several."""
    return [
        event
        for event in profiler.events() or ()
        if event.device_type != torch.autograd.DeviceType.CPU and not getattr(event, "is_user_annotation", False)
    ]


def device_name() -> str:
    """Of the GPU, or "CPU", whose name is in the provenance."""
    return torch.cuda.get_device_name() if device().type == "cuda" else device().type.upper()
