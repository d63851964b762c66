"""The dense model's tensors, and the pieces of each in a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Holders, Piece, TensorKind

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class TensorInfo:
    """Facts of a dense tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    kind: TensorKind = "parameter"
    trainable: bool = True


PiecesOfTensor = list[tuple[Piece, Holders]]


def pieces_by_tensor(tensors: Sequence[TensorInfo], plan: Plan) -> dict[str, PiecesOfTensor]:
    """Pieces of each dense tensor with the ranks that hold them, by name. All ranks hold elements in no unit."""
    claimed: dict[str, PiecesOfTensor] = {}
    for index, unit in enumerate(plan.units):
        ranks = plan.ranks_of(index)
        for piece in unit.pieces:
            claimed.setdefault(piece.parameter, []).append((piece, ranks))
    return {info.name: _with_shared_rest(info, claimed.get(info.name, []), plan.all_ranks) for info in tensors}


def _with_shared_rest(info: TensorInfo, claimed: PiecesOfTensor, all_ranks: Holders) -> PiecesOfTensor:
    kind = info.kind
    if all(holders == all_ranks for _, holders in claimed):  # shared, at least in effect, so it is not cut
        return [(Piece(info.name, None, 0, math.prod(info.shape), kind), all_ranks)]
    dim = claimed[0][0].dim
    if dim is None:
        return claimed
    result: PiecesOfTensor = []
    position = 0
    for piece, holders in sorted(claimed, key=lambda item: item[0].start):
        if piece.start > position:
            result.append((Piece(info.name, dim, position, piece.start - position, kind), all_ranks))
        result.append((piece, holders))
        position = piece.start + piece.length
    if position < info.shape[dim]:
        result.append((Piece(info.name, dim, position, info.shape[dim] - position, kind), all_ranks))
    return result


def dense_tensors(model: nn.Module) -> list[TensorInfo]:
    """Facts of a whole model's parameters, in model order."""
    return [tensor_info(name, parameter) for name, parameter in model.named_parameters()]


def tensor_info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(name, tuple(tensor.shape), tensor.dtype, trainable=tensor.requires_grad)


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
