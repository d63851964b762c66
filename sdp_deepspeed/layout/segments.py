"""Segments of the flat layout: who owns which shard, and who carries which slice for its node.

A segment is a flat stretch of pieces that share an optimizer param group, a dtype and a holder set. It
is cut into one shard per holder, or one holder owns all of it; a shard's owner averages it and steps it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes, Receivers

# GPUs send what is not aligned to 16 bytes byte by byte (NCCL), and small stretches gain nothing from it.
ALIGNMENT, LARGE = 64, 1024  # elements


def aligned(num_elements: int) -> int:
    """The length of a large stretch that others follow, so that they begin at a multiple of 16 bytes in any dtype."""
    return padded(num_elements) if num_elements >= LARGE else num_elements


def padded(num_elements: int) -> int:
    """The next length after which others begin at a multiple of 16 bytes."""
    return -(-num_elements // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Segment:
    """Fragments that travel together: one param group, one dtype, one holder set.

    Args:
        holders: ranks of the data-parallel group, ascending.
        owners: the same in the order of their shards; ascending too if it is not given.
        sole_owner: the holder that owns all of it, where whole tensors are stepped; None if each owns a shard.
        window: segments of the same number travel in one bucket, since they are complete at the same time.
    """

    group: int
    dtype: Any
    holders: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    owners: tuple[int, ...] = ()
    sole_owner: int | None = None
    window: int = 0
    num_elements: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", self.owners or self.holders)
        object.__setattr__(self, "num_elements", sum(fragment.num_elements for fragment in self.fragments))

    @property
    def _position(self) -> Mapping[int, int]:
        return _positions(self.owners)

    @cached_property
    def _shard_length(self) -> int:
        return aligned(-(-self.num_elements // len(self.holders)))

    @property
    def num_shards(self) -> int:
        return len(self.holders) if self.sole_owner is None else 1

    def held_by(self, rank: int) -> bool:
        return rank in self._position

    def owned_range(self, rank: int) -> tuple[int, int]:
        """Start and stop (elements) of the shard that `rank` owns; empty when it holds nothing here."""
        if self.sole_owner is not None:
            return 0, self.num_elements * (rank == self.sole_owner)
        index = self._position.get(rank)
        if index is None:
            return 0, 0
        length = self._shard_length
        return min(index * length, self.num_elements), min((index + 1) * length, self.num_elements)

    def owners_of(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The owners of elements [start, stop), each with start and stop of what it has of them."""
        if self.sole_owner is not None:
            yield self.sole_owner, start, stop
            return
        length = self._shard_length
        for index in range(start // length, -(-stop // length)):
            yield self.owners[index], max(start, index * length), min(stop, (index + 1) * length)

    def slices(self, ranks: Sequence[int]) -> list[tuple[int, int, int]]:
        """The whole segment in one slice for each of `ranks`, nearly even, in which a holder's own shard lies.

        Args:
            ranks: in the order of their shards, if they hold it.

        Returns:
            Rank, start and stop (elements), one after the other.
        """
        if self.sole_owner in ranks:
            place = ranks.index(self.sole_owner)
            edges = [0] * (place + 1) + [self.num_elements] * (len(ranks) - place)
            return list(zip(ranks, edges, edges[1:], strict=False))
        starts = [0]
        length = aligned(-(-self.num_elements // max(1, len(ranks))))
        shard, position = self._shard_length, self._position if self.sole_owner is None else {}
        for index, (before, after) in enumerate(itertools.pairwise(ranks), start=1):
            cut = index * length
            if before in position:
                cut = min(max(cut, (position[before] + 1) * shard), position[after] * shard)
            starts.append(min(cut, self.num_elements))
        return list(zip(ranks, starts, [*starts[1:], self.num_elements], strict=False))

    def split(self, length: int) -> Iterator[Segment]:
        """This segment as segments of at most `length` elements."""
        for start in range(0, self.num_elements, max(1, length)):
            fragments = tuple(self.cut(start, min(start + max(1, length), self.num_elements)))
            yield replace(self, fragments=fragments)

    def cut(self, start: int, stop: int) -> Iterator[Fragment]:
        """The fragments of elements [start, stop) of this segment."""
        position = 0
        for fragment in self.fragments:
            length = fragment.stop - fragment.start
            low, high = max(start, position), min(stop, position + length)
            if low < high:
                offset = fragment.start - position
                yield Fragment(fragment.piece, low + offset, high + offset)
            position += length


@cache
def _positions(owners: tuple[int, ...]) -> Mapping[int, int]:
    return {rank: index for index, rank in enumerate(owners)}


def receives(segment: Segment, rank: int, receivers: Receivers) -> bool:
    """Whether `rank` is among the receivers of what the owners of `segment` send back."""
    if receivers == "all":
        return True
    return segment.held_by(rank) == (receivers == "holders")


def carriers(segment: Segment, nodes: Nodes, receivers: Receivers) -> list[list[tuple[int, int, int]]]:
    """For each node the ranks that carry the segment for it, each with start and stop of its slice.

    Its holders, or all ranks of a node without holders that needs it nonetheless.
    """
    return [segment.slices(ranks) for ranks in carrying_ranks(segment.owners, nodes, receivers)]


@cache
def carrying_ranks(owners: tuple[int, ...], nodes: Nodes, receivers: Receivers) -> tuple[tuple[int, ...], ...]:
    """For each node the carriers of what `owners` hold."""
    return tuple(
        tuple(own) or (() if receivers == "holders" else ranks)
        for ranks, own in zip(nodes.ranks, nodes.per_node(owners), strict=True)
    )
