"""Where the pieces of the dense model lie in this rank's tensors.

A whole tensor lies as in the dense model. Of a tensor that neuron units cut, a rank stores the pieces that it holds
side by side in dense order, and in the backward regime those that it lacks likewise, apart. Both are stored with the
cut dim outermost, so that each piece is one stretch of memory; or channels last, as the dense tensor was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sdp_deepspeed.layout.cuts import Location
from sdp_deepspeed.units import Piece


def in_order(piece: Piece, view: torch.Tensor) -> torch.Tensor:
    """A piece's view with its elements in the order in which they travel: the cut dim first, then row-major."""
    return view if piece.dim is None else view.movedim(piece.dim, 0)


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last, if the strides say so; else that of row-major tensors."""
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if tensor.dim() == (4 if memory_format == torch.channels_last else 5):
            strides = _strides(tensor.shape, (*range(2, tensor.dim()), 1))
            if tensor.stride() == strides != _strides(tensor.shape, range(1, tensor.dim())):
                return memory_format
    return torch.contiguous_format


def _strides(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Of a dense tensor with dim 0 outermost in memory, then those of `order`."""
    strides, stride = [0] * len(shape), 1
    for dim in (*reversed((*order,)), 0):
        strides[dim], stride = stride, stride * shape[dim]
    return tuple(strides)


def side_by_side(
    pieces: Sequence[Piece], dense: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
) -> torch.Tensor:
    """A copy of `pieces` of one tensor, side by side along their dim, which is outermost in memory unless another
    format is asked for."""
    dim = pieces[0].dim
    assert dim is not None, "whole tensors stay where they are"
    if memory_format != torch.contiguous_format:
        return torch.cat([piece.narrow(dense) for piece in pieces], dim).clone(memory_format=memory_format)
    copied = torch.cat([in_order(piece, piece.narrow(dense)) for piece in pieces])
    return copied.movedim(0, dim)


@dataclass(frozen=True)
class Place:
    """A piece inside one of this rank's tensors.

    Args:
        start: first index along the piece's dim.
        lacking: the tensor, if that is not the module's parameter but what the rank lacks of it.
    """

    start: int
    lacking: torch.Tensor | None = None


class Stored(NamedTuple):
    """One of this rank's tensors, with a dim outermost.

    Args:
        dim: None for the tensor as it is.
        is_lacking: whether it has what the rank lacks of the parameter.
    """

    parameter: str
    dim: int | None
    is_lacking: bool

    def in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its elements in the order in which they travel."""
        return tensor if self.dim is None else tensor.movedim(self.dim, 0)


class PieceViews:
    """Views of pieces in this rank's tensors.

    Args:
        tensors: the module's parameters and buffers by dense name, whole; their storage may change later.

    Attributes:
        shapes: by dense name the shapes of `tensors` when they were whole.
        formats: by dense name their memory formats.
        lacking: by dense name the tensors of what this rank stores but does not train.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.formats = {name: memory_format_of(tensor) for name, tensor in tensors.items()}
        self.lacking: dict[str, torch.Tensor] = {}
        self._places: dict[Piece, Place] = {}

    def put(self, pieces: Sequence[Piece], lacking: torch.Tensor | None = None) -> None:
        """Say that `pieces` of one tensor lie side by side, in the module's parameter or in `lacking`."""
        if lacking is not None:
            self.lacking[pieces[0].parameter] = lacking
        start = 0
        for piece in pieces:
            self._places[piece] = Place(start, lacking)
            start += piece.length

    def cut_pieces(self, parameter: str) -> list[Piece]:
        """The pieces of a tensor that lie side by side here; none if it lies as in the dense model, or not at all."""
        return [piece for piece in self._places if piece.parameter == parameter]

    def weight_view(self, piece: Piece) -> torch.Tensor:
        """View of the piece in the weights, shaped as in the dense model; all pieces that this rank stores."""
        place = self._places.get(piece)
        if place is not None and place.lacking is not None:
            return place.lacking.narrow(piece.dim or 0, place.start, piece.length)
        return self.view_in(piece, self.tensors[piece.parameter].detach())

    def locate(self, piece: Piece) -> Location:
        """In which tensor the piece is stored (a `Stored`), and where it begins there."""
        if piece.dim is None:
            return Location(Stored(piece.parameter, None, False), 0)
        place = self._places.get(piece, Place(piece.start))
        shape = self.shapes[piece.parameter]
        start = place.start * (math.prod(shape) // shape[piece.dim])
        return Location(Stored(piece.parameter, piece.dim, place.lacking is not None), start)

    def tensor(self, key: Stored) -> torch.Tensor:
        """Weights, in the order in which they travel."""
        tensor = self.lacking[key.parameter] if key.is_lacking else self.tensors[key.parameter].detach()
        return key.in_order(tensor)

    def view_in(self, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
        """View of a held piece in `tensor`, which is laid out like the parameter on this rank: its gradient."""
        place = self._places.get(piece)
        if place is None:
            return piece.narrow(tensor)
        return tensor.narrow(piece.dim or 0, place.start, piece.length)
