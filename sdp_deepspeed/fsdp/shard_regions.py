"""Where the shards of a held tensor lie in the dense one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.fsdp.pieces import HeldTensor, rows_of
from sdp_deepspeed.units import Piece

Part = tuple[Box, Box]
"""A box of a dense tensor, and the box of the local shard that has its elements."""


@dataclass(frozen=True)
class ShardRegion:
    """What one holder stores of one interval of a held tensor.

    Args:
        tensor: name of the held one.
        dense_name: of the dense one.
        owner: rank of the holder.
        dense, shard: its boxes in the dense tensor and in the owner's shard.
    """

    tensor: str
    dense_name: str
    owner: int
    dense: Box
    shard: Box

    @property
    def num_elements(self) -> int:
        return self.dense.num_elements

    def in_dense(self, dense: torch.Tensor) -> torch.Tensor:
        """View of it in the dense tensor."""
        return dense[self.dense.slices_in(Box.whole(dense.shape))]

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """View of it in the owner's shard."""
        return shard[self.shard.slices_in(Box.whole(shard.shape))]

    @property
    def piece(self) -> Piece:
        """What stands for it where pieces travel: one of its own, which no dense tensor has."""
        offsets = "+".join(map(str, self.dense.offsets))
        return Piece(f"{self.tensor}@{self.owner}+{offsets}", None, 0, self.num_elements)


def regions_of(held: HeldTensor, dense_shape: Sequence[int]) -> Iterator[ShardRegion]:
    """All of them, holder by holder; together every element of the held tensor once.

    Args:
        dense_shape: of the dense parameter.
    """
    for owner in held.holders:
        for dense, shard in parts_of_shard(held, owner, dense_shape):
            yield ShardRegion(held.name, held.dense_name, owner, dense, shard)


def parts_of_shard(held: HeldTensor, rank: int, dense_shape: Sequence[int]) -> Iterator[Part]:
    """Of what `rank` stores, in the order of the intervals; none if that is nothing.

    Args:
        rank: one of the holders.
        dense_shape: of the dense parameter.
    """
    shape = held.shape(dense_shape)
    start, stop = rows_of(held.holders.index(rank), len(held.holders), shape[0])
    shard = Box((start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]))
    if not shard.num_elements:
        return
    for dense, in_tensor in _intervals(held, dense_shape):
        part = in_tensor.overlap(shard)
        if part is not None:
            shift = [a - b for a, b in zip(dense.offsets, in_tensor.offsets, strict=True)]
            moved = tuple(offset + by for offset, by in zip(part.offsets, shift, strict=True))
            inside = tuple(a - b for a, b in zip(part.offsets, shard.offsets, strict=True))
            yield Box(moved, part.sizes), Box(inside, part.sizes)


def _intervals(held: HeldTensor, dense_shape: Sequence[int]) -> Iterator[tuple[Box, Box]]:
    """Each interval as a box of the dense tensor, and as one of the tensor that is sharded."""
    whole = Box.whole(dense_shape)
    if held.dim is None:
        yield whole, whole
        return
    dim, begin = held.dim, 0
    for start, length in held.intervals:
        sizes = _with(whole.sizes, dim, length)
        yield Box(_with(whole.offsets, dim, start), sizes), Box(_with(whole.offsets, dim, begin), sizes)
        begin += length


def _with(sizes: Sequence[int], dim: int, value: int) -> tuple[int, ...]:
    return (*sizes[:dim], value, *sizes[dim + 1 :])
