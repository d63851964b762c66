"""CPU offload: the optimizer steps a shard in host memory, while weights stay on the device. Also moves states to the
host between steps (DeepSpeed's `offload_states`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

Moved = list[tuple[torch.Tensor, torch.device]]


class OffloadedShard:
    """Host memory of one shard: fp32 weights, their gradient, and a staging buffer of rounded weights.

    With pinned memory, copies are asynchronous on the device's current stream: synchronize it before the host reads a
    gradient, and before weights are stepped again.

    Args:
        weights: flat, on the device.
        pin_memory: whether to use page-locked memory, if the device is not the CPU.

    Attributes:
        weights: flat, fp32.
    """

    def __init__(self, weights: torch.Tensor, *, pin_memory: bool) -> None:
        self._device, self._pins = weights.device, pin_memory and weights.device.type != "cpu"
        dtype = torch.promote_types(weights.dtype, torch.float32)
        self.weights = self._memory(weights, dtype).copy_(weights)
        self._gradient = self._memory(weights, dtype)
        self._rounded = self.weights if weights.dtype == dtype else self._memory(weights, weights.dtype)

    def _memory(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=self._pins)

    def receive_gradient(self, gradient: torch.Tensor, *, adds: bool) -> torch.Tensor:
        """Copy a gradient to host memory, and return it there.

        Args:
            gradient: fp32, on the device; overwritten.
        """
        if adds:
            gradient.add_(self._gradient.to(self._device, non_blocking=self._pins))
        return self._gradient.copy_(gradient, non_blocking=self._pins)

    def send_weights(self, target: torch.Tensor) -> None:
        """Copy `weights`, rounded, to a tensor on the device."""
        if self._rounded is not self.weights:
            self._rounded.copy_(self.weights)
        target.copy_(self._rounded, non_blocking=self._pins)


def move_to_host(tensors: Iterable[torch.Tensor], *, pin_memory: bool) -> Moved:
    """Move tensors to host memory in place. Returns the moved ones, for `move_back`."""
    moved = [(tensor, tensor.device) for tensor in tensors if tensor.device.type != "cpu"]
    for tensor, _ in moved:
        tensor.data = torch.empty_like(tensor, device="cpu", pin_memory=pin_memory).copy_(tensor.detach())
    return moved


def move_back(moved: Moved) -> None:
    """Undo `move_to_host`."""
    for tensor, device in moved:
        tensor.data = tensor.detach().to(device)
