"""What masking frees goes back to the system or the device: allocators would keep most of it."""

from __future__ import annotations

import ctypes

import torch


def give_back(device: torch.device) -> None:
    """Return free memory of this process, on the host and on `device`.

    On a device PyTorch keeps what was freed, so that neither NCCL nor another process can take it, and what is
    allocated next may not fit into the holes. On the host glibc keeps blocks below its threshold, which grows up to 32
    MiB with the blocks that are freed: tensors of a model in half precision, say. Other C libraries are left alone.
    """
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(ctypes.c_size_t(0))
