"""Where the shards of a held tensor lie in the dense one: boxes of elements, of one holder each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.fsdp.pieces import HeldTensor, rows_of
from sdp_deepspeed.units import Piece

_Span = tuple[int, int]  # start, length


@dataclass(frozen=True)
class ShardRegion:
    """What one holder stores of one interval of a held tensor.

    Args:
        tensor: name of the held one.
        dense_name: of the dense one.
        owner: rank of the holder.
        dim: along which intervals are cut; 0 if the tensor is whole.
        rows, columns: along dim 0 and along `dim` in the dense tensor; where `dim` is 0, columns are all there is.
        own_rows, own_columns: the same in the owner's shard.
        num_elements: of it.
    """

    tensor: str
    dense_name: str
    owner: int
    dim: int
    rows: _Span
    columns: _Span | None
    own_rows: _Span
    own_columns: _Span | None
    num_elements: int

    def in_dense(self, dense: torch.Tensor) -> torch.Tensor:
        """View of it in the dense tensor."""
        return self._view(dense, self.rows, self.columns)

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """View of it in the owner's shard."""
        return self._view(shard, self.own_rows, self.own_columns)

    def _view(self, tensor: torch.Tensor, rows: _Span, columns: _Span | None) -> torch.Tensor:
        view = tensor.narrow(0, *rows)
        return view if columns is None else view.narrow(self.dim, *columns)

    @property
    def piece(self) -> Piece:
        """What stands for it where pieces travel: one of its own, which no dense tensor has."""
        name = f"{self.tensor}@{self.owner}+{self.rows[0]}+{self.columns[0] if self.columns else 0}"
        return Piece(name, None, 0, self.num_elements)


def regions_of(held: HeldTensor, dense_shape: Sequence[int]) -> Iterator[ShardRegion]:
    """All of them, holder by holder; together every element of the held tensor once.

    Args:
        dense_shape: of the dense parameter.
    """
    shape = held.shape(dense_shape)
    dim = held.dim or 0
    intervals = held.intervals if held.dim is not None else ((0, shape[0]),)
    across = math.prod(size for index, size in enumerate(shape) if index not in (0, dim))
    for position, owner in enumerate(held.holders):
        first, last = rows_of(position, len(held.holders), shape[0])
        begin = 0  # of the interval in the held tensor
        for start, length in intervals:
            if dim:
                rows, own_rows = (first, last - first), (0, last - first)
                columns, own_columns, count = (start, length), (begin, length), (last - first) * length
            else:
                low, high = max(first, begin), min(last, begin + length)
                rows, own_rows = (start + low - begin, high - low), (low - first, high - low)
                columns, own_columns, count = None, None, high - low
            begin += length
            if count > 0:
                where = (rows, columns, own_rows, own_columns)
                yield ShardRegion(held.name, held.dense_name, owner, dim, *where, count * across)
