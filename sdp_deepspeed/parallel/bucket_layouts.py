"""Assignment of slices to buckets: slices with the same holders, param group and dtype share one.

`plan_buckets` is a pure function of facts that all ranks share. Every rank computes the same list, including buckets of
other holders. Its order is the order of collectives, which optimizer.py proves to be free of deadlocks.

Buckets are cut at common depth boundaries. The slices of a holder set may span the whole model (with neurons every set
touches every layer), and a bucket is complete only when the gradient of its first layer is ready. Without boundaries,
nothing would overlap with backward, and ZeRO stage 2 would keep all gradients.

An optimizer that updates whole tensors (Muon) cannot step equal shards. Its tensors are assigned to the holders. Each
bucket has the tensors that one rank steps, which receives their gradients and broadcasts their weights.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from sdp_deepspeed.units import Holders, Piece, Pieces

BUCKET_SIZE = 50_000_000  # elements; the default


class Slice(NamedTuple):
    """A piece of a dense tensor in a bucket.

    Args:
        shape: shape of the slice, in row-major order.
    """

    piece: Piece
    start: int
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """Contents of a bucket, the same on all ranks.

    Args:
        depth_range: 0 for the last layers, whose gradients are ready first.
        is_cut: whether the slices are parts of cut tensors, not whole tensors.
        is_tp_replicated: whether all tensor-parallel ranks have the same values.
        stepping_position: position in `holders` of the rank that steps the bucket, for an optimizer of whole tensors;
            None if each steps a shard.
        slices: slices in the order in which their gradients become ready.
    """

    depth_range: int
    holders: Holders
    param_group: int
    dtype: torch.dtype
    is_cut: bool
    is_tp_replicated: bool
    stepping_position: int | None
    slices: tuple[Slice, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        """Dense names of the tensors that the slices are of."""
        return list(dict.fromkeys(item.piece.parameter for item in self.slices))

    @cached_property
    def num_elements(self) -> int:
        last = self.slices[-1]
        return last.start + last.num_elements

    @property
    def owners(self) -> Holders:
        """The holder that owns each shard."""
        return self.holders if self.stepping_position is None else (self.holders[self.stepping_position],)

    @cached_property
    def size(self) -> int:
        """Elements of the flat buffer: `num_elements`, padded with zeros to equal shards."""
        return -(-self.num_elements // len(self.owners)) * len(self.owners)

    def shard_range(self, position: int) -> tuple[int, int]:
        """Range of elements that the holder at `position` owns, including padding."""
        if self.stepping_position is not None:
            return 0, self.size if position == self.stepping_position else 0
        size = self.size // len(self.owners)
        return position * size, (position + 1) * size

    def owned(self, position: int) -> Iterator[tuple[Slice, int, int]]:
        """Yield what lies in the shard of the holder at `position`: slice, and range within the slice."""
        first, end = self.shard_range(position)
        for item in self.slices:
            start, stop = max(first - item.start, 0), min(end - item.start, item.num_elements)
            if start < stop:
                yield item, start, stop


def plan_buckets(
    pieces: Pieces,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    param_group_of: Mapping[str, int],
    *,
    bucket_size: int | None = None,
    tp_replicated: Collection[str] = (),
    stepped_whole: Collection[str] = (),
) -> list[BucketLayout]:
    """All buckets of the model in the static global order of their collectives.

    Args:
        pieces: pieces of each dense tensor with their holders, in the order in which the forward pass uses tensors.
        param_group_of: param group index of each trained tensor; other tensors are in no bucket.
        bucket_size: maximum number of elements that a rank holds in one depth range, unless a single tensor has more.
            Default: 50 million, or a sixteenth of what a rank holds if that is more, since a rank has a bucket per
            holder set and depth range.
        tp_replicated: tensors that are equal on all tensor-parallel ranks.
        stepped_whole: tensors that must be stepped as a whole by one rank; none of them is cut.
    """
    whole = {name: pieces[name][0] for name in pieces if name in param_group_of and name in stepped_whole}
    stepping_positions = _deal(whole)
    backward_order = [name for name in reversed([*pieces]) if name in param_group_of]
    layouts: list[BucketLayout] = []
    for depth_range, names in enumerate(_depth_ranges(backward_order, pieces, shapes, bucket_size)):
        pieces_of: defaultdict[BucketLayout, list[Piece]] = defaultdict(list)  # by layouts without slices
        last_depth: dict[BucketLayout, int] = {}  # of its last tensor, within the range
        for depth, name in enumerate(names):
            for piece, holders in pieces[name]:
                empty = BucketLayout(
                    depth_range,
                    holders,
                    param_group_of[name],
                    dtypes[name],
                    is_cut=piece.dim is not None,
                    is_tp_replicated=name in tp_replicated,
                    stepping_position=stepping_positions.get(name),
                )
                pieces_of[empty].append(piece)
                last_depth[empty] = depth
        # Layouts with the same last tensor differ in their holders only, so there are no ties.
        for empty in sorted(pieces_of, key=lambda empty: (last_depth[empty], empty.holders)):
            layouts.append(replace(empty, slices=_slices(pieces_of[empty], shapes)))
    return layouts


def _depth_ranges(
    names: Sequence[str], pieces: Pieces, shapes: Mapping[str, Sequence[int]], bucket_size: int | None
) -> list[list[str]]:
    """Group consecutive tensors so that no rank holds more than `bucket_size` elements of a group."""
    held: dict[str, Counter[int]] = {name: Counter() for name in names}  # number of elements by rank
    for name in names:
        for piece, holders in pieces[name]:
            held[name].update(dict.fromkeys(holders, piece.num_elements(shapes[name])))
    if bucket_size is None:
        total = sum(held.values(), Counter[int]())
        bucket_size = max(BUCKET_SIZE, max(total.values(), default=0) // 16)
    ranges: list[list[str]] = []
    load: Counter[int] = Counter()
    for name in names:
        if not ranges or any(load[rank] + size > bucket_size for rank, size in held[name].items()):
            ranges.append([])
            load.clear()
        ranges[-1].append(name)
        load.update(held[name])
    return ranges


def _deal(tensors: Mapping[str, tuple[Piece, Holders]]) -> dict[str, int]:
    """Position among the holders of the rank that steps each whole tensor: the largest tensor first, the holder with
    the fewest elements so far."""
    load: defaultdict[int, int] = defaultdict(int)
    positions = {}
    for name, (piece, holders) in sorted(tensors.items(), key=lambda item: -item[1][0].length):
        rank = min(holders, key=lambda rank: load[rank])
        positions[name] = holders.index(rank)
        load[rank] += piece.length
    return positions


def _slices(pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    start = 0
    for piece in pieces:
        dense = shapes[piece.parameter]
        shape = tuple(piece.length if dim == piece.dim else size for dim, size in enumerate(dense))
        slices.append(Slice(piece, start, shape))
        start += slices[-1].num_elements
    return tuple(slices)
