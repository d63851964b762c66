"""Gives the tensors of a masked model without storage their storage, and what a rank has of their dense values."""

from __future__ import annotations

import math
from typing import Any

import torch

from sdp_deepspeed.deferred_init.fills import Stretch
from sdp_deepspeed.deferred_init.init import PROGRAM
from sdp_deepspeed.deferred_init.operation import Ref, address
from sdp_deepspeed.deferred_init.program import allocate
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.plan.tensors import named_tensors


class Materializer:
    """Gives the tensors of a masked model on the meta device their storage.

    Args:
        mask: applied.
        device: where the storage shall be.
    """

    def __init__(self, mask: Mask, device: torch.device) -> None:
        self._views = mask.model.views
        self._dropped = mask.dropped_names()
        self._device = device
        twins = [twin for part in mask.parts for twin in getattr(part, "twins", ())]
        inside = [tensor for twin in twins for tensor in named_tensors(twin).values()]
        every = [*mask.model.views.tensors.values(), *mask.model.views.lacking.values(), *inside]
        self._tensors = list({id(tensor): tensor for tensor in every}.values())
        self._waiting: dict[int, list[torch.Tensor]] = {}  # by the address of their storage
        for tensor in self._tensors:
            if tensor.is_meta:
                self._waiting.setdefault(address(tensor), []).append(tensor)

    def is_dropped(self, name: str) -> bool:
        """Whether this rank stores nothing of the tensor."""
        return name in self._dropped

    def stretches(self, name: str) -> list[Stretch]:
        """Of a contiguous dense tensor the elements that this rank stores, ascending; none if it is not some rows."""
        pieces = self._views.cut_pieces(name)
        if any(piece.dim != 0 for piece in pieces):
            return []
        row = math.prod(self._views.shapes[name][1:])
        return sorted((piece.start * row, (piece.start + piece.length) * row) for piece in pieces)

    def store(self, name: str, dense: torch.Tensor) -> None:
        """Store what this rank has of a tensor, whose dense value is there as far as it has it, and kept by nobody
        else."""
        tensor_here = self._views.tensors[name]
        pieces = self._views.cut_pieces(name)
        if not pieces:
            if tensor_here.is_meta:
                self._give(tensor_here, self._storage_of(tensor_here, dense))
            else:
                tensor_here.detach().copy_(dense)
            return
        for tensor in (tensor_here, self._views.lacking.get(name)):
            if tensor is not None and tensor.is_meta:
                self._give(tensor, allocate(tensor.untyped_storage().nbytes(), zeros=False, device=self._device))
        for piece in pieces:
            self._views.weight_view(piece).copy_(piece.narrow(dense))

    def _storage_of(self, own: torch.Tensor, dense: torch.Tensor) -> torch.UntypedStorage:
        """With the dense value, as the tensor wants it; the value's own if it is that already."""
        size, storage = own.untyped_storage().nbytes(), dense.untyped_storage()
        if layout(own) == layout(dense) and storage.nbytes() == size and dense.device == self._device:
            return storage
        result = allocate(size, zeros=False, device=self._device)
        Ref.of(own).view(result).copy_(dense)
        return result

    def _give(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """To all tensors that share the tensor's storage."""
        for sharing in self._waiting.pop(address(tensor)):
            _replace_impl(sharing, Ref.of(sharing).view(storage))

    def finish(self) -> None:
        """What is left are dropped tensors, which are empty, and the lacking halves' biases, which add nothing."""
        for tensors in list(self._waiting.values()):
            size = tensors[0].untyped_storage().nbytes()
            self._give(tensors[0], allocate(size, zeros=True, device=self._device))
        for tensor in self._tensors:
            tensor.__dict__.pop(PROGRAM, None)
            if tensor.device != self._device:
                tensor.data = tensor.data.to(self._device)


def _replace_impl(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """The same object with the same attributes, for optimizers and whoever else has it, on another device.

    Assigning to `.data` does not move a tensor between devices; `torch.utils.swap_tensors` refuses tensors with weak
    references, which DeepSpeed has to all parameters, though they stay true where the object stays.
    """
    torch._C._swap_tensor_impl(tensor, value.requires_grad_(tensor.requires_grad))


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a view into a storage is."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
