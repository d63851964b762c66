"""Copies between a device and page-locked host memory: the device makes them by itself while the host goes on."""

from __future__ import annotations

from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the order of what a device does."""

    def synchronize(self) -> None:
        """Until the device is there."""


class _Reached:
    def synchronize(self) -> None:
        """Nothing to wait for."""


class HostCopies:
    """They are queued on the device's current stream, behind what computes their source and before what reads their
    target there; the host waits for a mark.

    Args:
        device: any but the host.
        pin_memory: page-locked; without it each copy is done when its call returns.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        self.device = device
        self._pins = pin_memory

    def memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """On the host. To be kept: page-locking takes longer than a copy."""
        return torch.empty(num_elements, dtype=dtype, device="cpu", pin_memory=self._pins)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """One of them of `memory`, which must stay as it is until the next mark is reached."""
        target.copy_(source, non_blocking=self._pins)

    def mark(self) -> Mark:
        """Behind all copies so far."""
        if not self._pins:
            return _Reached()
        event = torch.Event(self.device)
        event.record()
        return event
