"""Who sends what to whom in the two collectives of a bucket: inside nodes, and between them.

Each node's carriers share a segment among them, in one slice each. Gradients go to the carriers of a rank's own node,
who add them up, and from there to the owners; what the owners send back goes to the carriers of the other nodes, and
from there to their neighbors. So one table of routes serves both directions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.cuts import Location, Moves, one_after_the_other
from sdp_deepspeed.layout.fragments import Fragment, Transfer
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import Segment, carriers, carrying_ranks, padded


class Stretch(NamedTuple):
    """Elements [start, stop) of one segment of a bucket."""

    segment: int
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Stretch) -> bool:
        """Whether they have elements in common, if they are of one segment."""
        return self.start < other.stop and other.start < self.stop

    def fragments(self, segments: Sequence[Segment]) -> Iterator[Fragment]:
        """It consists of these.

        Args:
            segments: of the bucket.
        """
        return segments[self.segment].cut(self.start, self.stop)


@dataclass(frozen=True, eq=False)
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
        lengths = [sum(stop - start for _, start, stop in stretches) for stretches in self.by_peer]
        return [padded(length) for length in lengths] if self.bucket.has_large_shards else lengths

    @cached_property
    def num_elements(self) -> int:
        """Of the buffer."""
        return sum(self.splits)

    @property
    def stretches(self) -> list[Stretch]:
        return [stretch for stretches in self.by_peer for stretch in stretches]

    @property
    def locations(self) -> list[Location]:
        """Of `stretches` in the buffer."""
        starts = itertools.accumulate(self.splits, initial=0)
        return [
            location
            for start, stretches in zip(starts, self.by_peer, strict=False)
            for location in one_after_the_other([stop - start for _, start, stop in stretches], Location(0, start))
        ]

    def _first(self) -> dict[Stretch, Location]:
        """Where each distinct stretch is first, for several ranks may get it; ascending."""
        first: dict[Stretch, Location] = {}
        for stretch, location in zip(self.stretches, self.locations, strict=True):
            first.setdefault(stretch, location)
        return first

    @cached_property
    def repeats(self) -> Moves:
        """Inside the buffer, from stretches to the same ones further on."""
        first, pairs = self._first(), zip(self.stretches, self.locations, strict=True)
        return Moves((first[s], there, s.num_elements) for s, there in pairs if first[s] != there)

    @cached_property
    def transfer(self) -> Transfer:
        """Between this rank's tensors and the first of equal stretches."""
        return transfer(self.bucket, self._first().items())


def transfer(bucket: Bucket, stretches: Iterable[tuple[Stretch, Location]]) -> Transfer:
    """Between this rank's tensors and stretches of flat ones.

    Args:
        stretches: with where each begins.
    """
    fragments: list[Fragment] = []
    locations: list[Location] = []
    for stretch, begin in stretches:
        parts = list(stretch.fragments(bucket.segments))
        fragments += parts
        locations += one_after_the_other([part.stop - part.start for part in parts], begin)
    return Transfer(fragments, locations)


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


class _Ways(NamedTuple):
    """What segments of one holder set have in common.

    Args:
        receiving: ranks that get what the owners send back.
        carriers: of each node.
        asking: nodes whose carriers get their slices from elsewhere.
        crosses: whether anything is sent between nodes.
        spreads: whether anything is sent inside a node.
    """

    receiving: frozenset[int]
    carriers: tuple[tuple[int, ...], ...]
    asking: tuple[int, ...]
    crosses: bool
    spreads: bool


@cache
def _ways(owners: tuple[int, ...], nodes: Nodes, receivers: Receivers) -> _Ways:
    ranks, holding = range(len(nodes.of_rank)), frozenset(owners)
    receiving = {"holders": holding, "others": holding.symmetric_difference(ranks), "all": frozenset(ranks)}[receivers]
    carriers = carrying_ranks(owners, nodes, receivers)
    has_it = [receivers == "others" and not holding.isdisjoint(part) for part in carriers]
    asking = tuple(node for node, part in enumerate(carriers) if part and not has_it[node])
    spreads = any(
        part and part != (peer,)
        for peers, part in zip(nodes.ranks, carriers, strict=True)
        for peer in receiving.intersection(peers)
    )
    return _Ways(receiving, carriers, asking, len(asking) > (receivers != "others"), spreads)


def routes_back(bucket: Bucket, rank: int, nodes: Nodes, receivers: Receivers) -> tuple[Route, Route]:
    """The ways back for `rank`: between nodes, from owners to carriers; inside its node, from carriers to receivers.

    Nobody sends to itself, and nothing crosses that is on the other node already.
    """
    between, inside = (_Builder(bucket, len(nodes.of_rank)) for _ in range(2))
    here = nodes.of_rank[rank]
    for index, segment in enumerate(bucket.segments):
        ways = _ways(segment.owners, nodes, receivers)
        inside.is_needed |= ways.spreads
        between.is_needed |= ways.crosses
        is_holder = segment.held_by(rank)
        if not is_holder and receivers == "holders":
            continue
        for carrier, start, stop in segment.slices(ways.carriers[here]):
            if carrier == rank:
                others = [peer for peer in nodes.ranks[here] if peer != rank and peer in ways.receiving]
                _add(inside.sent, index, start, stop, others)
                if here in ways.asking:
                    for owner, low, high in segment.owners_of(start, stop):
                        _add(between.received, index, low, high, [owner] * (nodes.of_rank[owner] != here))
            elif rank in ways.receiving:
                _add(inside.received, index, start, stop, [carrier])
        own_start, own_stop = segment.owned_range(rank)
        for node in ways.asking if is_holder else ():
            for carrier, start, stop in segment.slices(ways.carriers[node]) if node != here else ():
                _add(between.sent, index, max(start, own_start), min(stop, own_stop), [carrier])
    return between.close(), inside.close()


def _add(peers: list[list[Stretch]], index: int, start: int, stop: int, to: Sequence[int]) -> None:
    if start < stop:
        for peer in to:
            peers[peer].append(Stretch(index, start, stop))
