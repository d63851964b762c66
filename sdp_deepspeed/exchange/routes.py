"""Who sends what to whom in the two collectives of a bucket: inside nodes, and between them.

Each node's carriers share a segment among them, in one slice each. Gradients go to the carriers of a rank's own node,
who add them up, and from there to the owners; what the owners send back goes to the carriers of the other nodes, and
from there to their neighbors. So one table of routes serves both directions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import Segment, carriers, padded, receives


@dataclass(frozen=True)
class Stretch:
    """Elements [start, stop) of one segment of a bucket."""

    segment: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def fragments(self, segments: Sequence[Segment]) -> Iterator[Fragment]:
        """It consists of these.

        Args:
            segments: of the bucket.
        """
        return segments[self.segment].cut(self.start, self.stop)


@dataclass(frozen=True)
class Half:
    """What a rank sends in one collective, or what it receives.

    Args:
        by_peer: for each rank of the group its stretches, in the order in which they lie in the buffer.
        bucket: in which they are.
    """

    by_peer: tuple[tuple[Stretch, ...], ...]
    bucket: Bucket

    @cached_property
    def splits(self) -> list[int]:
        """Elements of the buffer per peer: its stretches, and padding so that the next peer's are aligned."""
        lengths = [sum(stretch.num_elements for stretch in stretches) for stretches in self.by_peer]
        return [padded(length) for length in lengths] if self.bucket.has_large_shards else lengths

    @cached_property
    def num_elements(self) -> int:
        """Of the buffer."""
        return sum(self.splits)

    @cached_property
    def stretches(self) -> list[Stretch]:
        return [stretch for stretches in self.by_peer for stretch in stretches]

    @cached_property
    def from_peers(self) -> list[tuple[int, tuple[Stretch, ...], list[int]]]:
        """Where the stretches of each peer that has some begin in the buffer, and their sizes."""
        starts = itertools.accumulate(self.splits, initial=0)
        return [
            (start, stretches, [stretch.num_elements for stretch in stretches])
            for start, stretches in zip(starts, self.by_peer, strict=False)
            if stretches
        ]

    @cached_property
    def _first(self) -> dict[Stretch, int]:
        """Of each distinct stretch, for several ranks may get it, which of `stretches` it is first."""
        return {stretch: index for index, stretch in reversed(list(enumerate(self.stretches)))}

    @cached_property
    def repeats(self) -> list[tuple[int, int]]:
        """Which of `stretches` are the same as an earlier one, and as which."""
        pairs = [(index, self._first[stretch]) for index, stretch in enumerate(self.stretches)]
        return [(index, first) for index, first in pairs if index != first]

    @cached_property
    def _fragments(self) -> list[tuple[int, list[Fragment], list[int]]]:
        """Of each distinct stretch, with their sizes."""
        found = []
        for stretch, index in sorted(self._first.items(), key=lambda item: item[1]):
            fragments = list(stretch.fragments(self.bucket.segments))
            found.append((index, fragments, [fragment.num_elements for fragment in fragments]))
        return found

    @cached_property
    def fragments(self) -> list[Fragment]:
        """Of the distinct stretches."""
        return [fragment for _, fragments, _ in self._fragments for fragment in fragments]

    def pieces(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The views of `fragments` in the buffer."""
        parts = self.parts(buffer)
        return [piece for index, _, sizes in self._fragments for piece in cut(parts[index], sizes)]

    @cached_property
    def _sizes(self) -> tuple[list[int], list[int]]:
        """Of the buffer's stretches and paddings, and which of them are stretches."""
        sizes: list[int] = []
        found: list[int] = []
        for stretches, split in zip(self.by_peer, self.splits, strict=True):
            found += range(len(sizes), len(sizes) + len(stretches))
            sizes += [stretch.num_elements for stretch in stretches]
            padding = split - sum(stretch.num_elements for stretch in stretches)
            sizes += [padding] * (padding > 0)
        return sizes, found

    def parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The stretches' views of the buffer."""
        sizes, found = self._sizes
        all_parts = cut(buffer, sizes)
        return all_parts if len(found) == len(sizes) else [all_parts[index] for index in found]


def cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Its stretches of `sizes`; the tensor itself where that is all, for views cost host time."""
    return list(flat.split(sizes)) if len(sizes) != 1 else [flat]


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives in one collective of the way back.

    Args:
        is_needed: whether any rank sends anything; the same on all ranks.
    """

    sent: Half
    received: Half
    is_needed: bool


def owned(bucket: Bucket, rank: int) -> list[Stretch]:
    """The shards of `rank` that are not empty."""
    ranges = [Stretch(index, *segment.owned_range(rank)) for index, segment in enumerate(bucket.segments)]
    return [stretch for stretch in ranges if stretch.num_elements]


def carried(bucket: Bucket, rank: int, nodes: Nodes) -> list[Stretch]:
    """The slices of what it holds that `rank` carries for its node and that are not empty."""
    return [
        Stretch(index, start, stop)
        for index, segment in enumerate(bucket.segments)
        for carrier, start, stop in carriers(segment, nodes, "holders")[nodes.of_rank[rank]]
        if carrier == rank and start < stop
    ]


class _Builder:
    """Collects the stretches of one collective."""

    def __init__(self, bucket: Bucket, size: int) -> None:
        self._bucket = bucket
        self.sent: list[list[Stretch]] = [[] for _ in range(size)]
        self.received: list[list[Stretch]] = [[] for _ in range(size)]
        self.is_needed = False

    def close(self) -> Route:
        sent, received = (Half(tuple(map(tuple, peers)), self._bucket) for peers in (self.sent, self.received))
        return Route(sent, received, self.is_needed)


def routes_back(bucket: Bucket, rank: int, nodes: Nodes, receivers: Receivers) -> tuple[Route, Route]:
    """The ways back for `rank`: between nodes, from owners to carriers; inside its node, from carriers to receivers.

    Nobody sends to itself, and nothing crosses that is on the other node already.
    """
    between, inside = (_Builder(bucket, len(nodes.of_rank)) for _ in range(2))
    for index, segment in enumerate(bucket.segments):
        slices = carriers(segment, nodes, receivers)
        here = nodes.of_rank[rank]
        has_it = [receivers == "others" and any(segment.held_by(peer) for peer, _, _ in part) for part in slices]
        inside.is_needed |= any(
            receives(segment, peer, receivers) and part and (len(part) > 1 or part[0][0] != peer)
            for peers, part in zip(nodes.ranks, slices, strict=True)
            for peer in peers
        )
        between.is_needed |= sum(bool(part) and not has for part, has in zip(slices, has_it, strict=True)) > (
            receivers != "others"
        )
        for carrier, start, stop in slices[here]:
            if carrier == rank:
                _add(inside.sent, index, start, stop, _others(nodes, segment, rank, receivers))
                if not has_it[here]:
                    _add_owners(between.received, index, segment, nodes, (here, start, stop))
            elif receives(segment, rank, receivers):
                _add(inside.received, index, start, stop, [carrier])
        own_start, own_stop = segment.owned_range(rank)
        for node, part in enumerate(slices):
            if node != here and not has_it[node]:
                for carrier, start, stop in part:
                    _add(between.sent, index, max(start, own_start), min(stop, own_stop), [carrier])
    return between.close(), inside.close()


def _others(nodes: Nodes, segment: Segment, rank: int, receivers: Receivers) -> list[int]:
    return [peer for peer in nodes.neighbors(rank) if peer != rank and receives(segment, peer, receivers)]


def _add(peers: list[list[Stretch]], index: int, start: int, stop: int, to: Sequence[int]) -> None:
    if start < stop:
        for peer in to:
            peers[peer].append(Stretch(index, start, stop))


def _add_owners(
    peers: list[list[Stretch]], index: int, segment: Segment, nodes: Nodes, part: tuple[int, int, int]
) -> None:
    """What the owners on other nodes have of a slice."""
    here, start, stop = part
    for owner in segment.owners:
        if nodes.of_rank[owner] != here:
            low, high = segment.owned_range(owner)
            _add(peers, index, max(start, low), min(stop, high), [owner])
