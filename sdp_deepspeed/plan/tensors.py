"""The dense model's tensors, and the pieces of each in a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class TensorInfo:
    """Facts of a dense tensor.

    Args:
        dtype: dtype of the weights (torch.dtype).
        trainable: whether it required gradients before masking.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    kind: str = "parameter"
    trainable: bool = True


def pieces_by_tensor(
    tensors: Sequence[TensorInfo], plan: Plan
) -> dict[tuple[str, str], list[tuple[Piece, tuple[int, ...]]]]:
    """Pieces of each dense tensor with the ranks that hold them, by (kind, name). All ranks hold elements in no
    unit."""
    everyone = tuple(range(len(plan.subnetwork_of_rank)))
    claimed: dict[tuple[str, str], list[tuple[Piece, tuple[int, ...]]]] = {}
    for index, unit in enumerate(plan.units):
        ranks = plan.ranks_of(index)
        for piece in unit.pieces:
            claimed.setdefault((piece.kind, piece.parameter), []).append((piece, ranks))
    return {
        (info.kind, info.name): _with_shared_rest(info, claimed.get((info.kind, info.name), []), everyone)
        for info in tensors
    }


def _with_shared_rest(
    info: TensorInfo, claimed: list[tuple[Piece, tuple[int, ...]]], everyone: tuple[int, ...]
) -> list[tuple[Piece, tuple[int, ...]]]:
    kind: Any = info.kind
    if not claimed:
        return [(Piece(info.name, None, 0, math.prod(info.shape), kind), everyone)]
    dim = claimed[0][0].dim
    if dim is None:
        return claimed
    if all(holders == everyone for _, holders in claimed):  # shared in effect, so it is not cut
        return [(Piece(info.name, None, 0, math.prod(info.shape), kind), everyone)]
    result: list[tuple[Piece, tuple[int, ...]]] = []
    position = 0
    for piece, holders in sorted(claimed, key=lambda item: item[0].start):
        if piece.start > position:
            result.append((Piece(info.name, dim, position, piece.start - position, kind), everyone))
        result.append((piece, holders))
        position = piece.start + piece.length
    if position < info.shape[dim]:
        result.append((Piece(info.name, dim, position, info.shape[dim] - position, kind), everyone))
    return result


def dense_tensors(model: nn.Module) -> list[TensorInfo]:
    """Facts of a whole model's parameters, in model order."""
    return [
        TensorInfo(name, tuple(parameter.shape), parameter.dtype, trainable=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by dense name, without duplicates."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def persistent_buffers(model: nn.Module) -> set[str]:
    """Dense names of buffers that are in state dicts."""
    return {*names_of_persistent_buffers(model).values()}


def names_of_persistent_buffers(model: nn.Module) -> dict[str, str]:
    """Dense names of buffers that are in state dicts, by all names there. As of parameters, the dense name is the first
    one, which need not be in state dicts itself."""
    first: dict[int, str] = {}
    names = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                path = f"{prefix}.{name}" if prefix else name
                dense = first.setdefault(id(buffer), path)
                if name not in module._non_persistent_buffers_set:
                    names[path] = dense
    return names
