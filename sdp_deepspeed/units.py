"""Units, the pieces of tensors of which they consist, and their costs.

Pure data in the names and coordinates of the dense model, so that optimizer, norm, dense view and export do not depend
on the strategy that made a unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Regime = Literal["forward", "backward"]
StrategyName = Literal["block", "neuron"]
TensorKind = Literal["parameter", "buffer"]
Subnetworks = tuple[int, ...]  # that hold a unit, ascending; as in `Plan.holders`
Holders = tuple[int, ...]  # data-parallel ranks whose subnetwork holds a unit, ascending


@dataclass(frozen=True)
class Piece:
    """A slice of one tensor of the dense model.

    Args:
        parameter: the tensor's dense name, as in `named_parameters()` or `named_buffers()`.
        dim: the stored dimension along which it is a slice; None means the whole tensor.
        start: first index along `dim` (0 for a whole tensor).
        length: number of indices along `dim`; for a whole tensor its number of elements.
    """

    parameter: str
    dim: int | None = None
    start: int = 0
    length: int = 0
    kind: TensorKind = "parameter"

    def __post_init__(self) -> None:
        if self.dim is not None and (self.dim < 0 or self.start < 0 or self.length < 1):
            raise ValueError(
                f"piece of {self.parameter!r}: got dim={self.dim}, start={self.start}, length={self.length}, expected "
                "a non-empty slice"
            )

    def narrow(self, tensor: Any) -> Any:
        """View of the piece in `tensor`, the dense tensor."""
        if self.dim is None:
            return tensor
        return tensor.narrow(self.dim, self.start, self.length)

    def offsets(self, num_dims: int) -> tuple[int, ...]:
        """Index of the first element in the dense tensor."""
        return tuple(self.start if dim == self.dim else 0 for dim in range(num_dims))

    def num_elements(self, shape: Iterable[int]) -> int:
        """Number of elements of this piece in a dense tensor of `shape`."""
        count = 1
        for dim, size in enumerate(shape):
            count *= self.length if dim == self.dim else size
        return count


Pieces = Mapping[str, Sequence[tuple[Piece, Holders]]]  # of each dense tensor, with the ranks that hold them


@dataclass(frozen=True)
class Unit:
    """The smallest part of a model that is either fully present on a rank or absent."""

    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class UnitCost:
    """Cost of a unit for a rank that holds it.

    Args:
        num_parameters: trainable elements.
        flops: forward FLOPs per example of the batch, or per token of text and sound; multiply and add counted as two.
    """

    num_parameters: int
    num_bytes: int
    flops: int


def check_pieces(units: Iterable[Unit], shape_of: Callable[[Piece], tuple[int, ...] | None]) -> None:
    """Check that units fit the model and do not overlap.

    Args:
        shape_of: shape of a piece's tensor in the dense model, None if the model has no such tensor.

    Raises:
        ValueError: unknown tensor, slice out of range, or an element claimed by two units.
    """
    claimed: dict[tuple[str, str], list[tuple[Piece, Unit]]] = {}
    for unit in units:
        for piece in unit.pieces:
            shape = shape_of(piece)
            if shape is None:
                raise ValueError(f"unit {unit.name!r}: the model has no {piece.kind} named {piece.parameter!r}")
            if piece.dim is not None and (piece.dim >= len(shape) or piece.start + piece.length > shape[piece.dim]):
                raise ValueError(
                    f"unit {unit.name!r}: piece of {piece.parameter!r} takes [{piece.start}, "
                    f"{piece.start + piece.length}) of dim {piece.dim}, but the tensor's shape is {shape}"
                )
            claimed.setdefault((piece.kind, piece.parameter), []).append((piece, unit))
    for claims in claimed.values():
        claims.sort(key=lambda claim: claim[0].start)
        for (piece, unit), (following, other) in itertools.pairwise(claims):
            if piece.dim is None or piece.dim != following.dim:
                raise ValueError(
                    f"{piece.parameter!r} is claimed by {unit.name!r} and {other.name!r}: pieces of one tensor must be "
                    "slices of the same dim"
                )
            if piece.start + piece.length > following.start:
                raise ValueError(f"{piece.parameter!r}: {unit.name!r} and {other.name!r} overlap along dim {piece.dim}")
