"""The flat layout of the exchange: segments, buckets, and who owns which shard.

A segment is a flat stretch of pieces that share an optimizer param group, a dtype and a holder set. It
is cut into one shard per holder; a shard's owner averages it and steps it. Everything here is computed
from the plan and the dense shapes alone, so all ranks build the same segments in the same order.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Piece

# GPUs send what is not aligned to 16 bytes byte by byte (NCCL), and small stretches gain nothing from it.
_ALIGNMENT, _LARGE = 64, 1024  # elements
_MESSAGE, _NUM_BUCKETS = 500_000, 16  # elements, buckets


def aligned(num_elements: int) -> int:
    """The length of a large stretch that others follow, so that they begin at a multiple of 16 bytes in any dtype."""
    return padded(num_elements) if num_elements >= _LARGE else num_elements


def padded(num_elements: int) -> int:
    """The next length after which others begin at a multiple of 16 bytes."""
    return -(-num_elements // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Segment:
    """Fragments that travel together: one param group, one dtype, one holder set.

    Args:
        holders: ranks of the data-parallel group, ascending.
        owners: the same in the order of their shards; ascending too if it is not given.
    """

    group: int
    dtype: Any
    holders: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    owners: tuple[int, ...] = ()
    num_elements: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "owners", self.owners or self.holders)
        object.__setattr__(self, "num_elements", sum(fragment.num_elements for fragment in self.fragments))

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.owners)}

    def held_by(self, rank: int) -> bool:
        return rank in self._position

    def owned_range(self, rank: int) -> tuple[int, int]:
        """Start and stop (elements) of the shard that `rank` owns; empty when it holds nothing here."""
        index = self._position.get(rank)
        if index is None:
            return 0, 0
        length = aligned(-(-self.num_elements // len(self.holders)))
        return min(index * length, self.num_elements), min((index + 1) * length, self.num_elements)

    def slices(self, ranks: Sequence[int]) -> list[tuple[int, int, int]]:
        """The whole segment in one slice for each of `ranks`, nearly even, in which a holder's own shard lies.

        Args:
            ranks: in the order of their shards, if they hold it.

        Returns:
            Rank, start and stop (elements), one after the other.
        """
        starts = [0]
        length = aligned(-(-self.num_elements // max(1, len(ranks))))
        for index, (before, after) in enumerate(itertools.pairwise(ranks), start=1):
            cut = min(index * length, self.num_elements)
            if self.held_by(before):
                cut = min(max(cut, self.owned_range(before)[1]), self.owned_range(after)[0])
            starts.append(cut)
        return list(zip(ranks, starts, [*starts[1:], self.num_elements], strict=False))

    def split(self, length: int) -> Iterator[Segment]:
        """This segment as segments of at most `length` elements."""
        for start in range(0, self.num_elements, max(1, length)):
            fragments = tuple(self.cut(start, min(start + max(1, length), self.num_elements)))
            yield Segment(self.group, self.dtype, self.holders, fragments, self.owners)

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


_Buffer = tuple[int, str]  # a rank, and what it is for


@dataclass(frozen=True)
class Bucket:
    """Segments of one dtype that share one pair of collectives."""

    index: int
    segments: tuple[Segment, ...]

    @cached_property
    def has_large_shards(self) -> bool:
        """Whether messages begin at multiples of 16 bytes; the same on all ranks."""
        return any(segment.num_elements >= _LARGE * len(segment.holders) for segment in self.segments)


class _Window:
    """A stretch of the model, of one dtype, that fits into one bucket: no rank packs more than the limit for it.

    Args:
        limits: what a rank may pack.
    """

    def __init__(self, limits: _Limits) -> None:
        self._limits = limits
        self._fragments: dict[tuple[int, tuple[int, ...]], list[Fragment]] = {}
        self._load: defaultdict[_Buffer, float] = defaultdict(float)

    def add(self, group: int, holders: tuple[int, ...], fragment: Fragment) -> Fragment | None:
        """Take as much of `fragment` as fits; what is left of it, None if nothing is."""
        copies = self._limits.copies(holders)
        room = min(int((self._limits.max_elements - self._load[buffer]) / n) for buffer, n in copies.items())
        if room < 1 and self._fragments:
            return fragment
        stop = min(fragment.stop, fragment.start + max(1, room))
        self._fragments.setdefault((group, holders), []).append(Fragment(fragment.piece, fragment.start, stop))
        for buffer, n in copies.items():
            self._load[buffer] += (stop - fragment.start) * n
        return Fragment(fragment.piece, stop, fragment.stop) if stop < fragment.stop else None

    def close(self, dtype: Any) -> list[Segment]:
        """Its segments; the window is empty again."""
        segments = [
            Segment(group, dtype, holders, tuple(parts), self._limits.nodes.shard_order(holders))
            for (group, holders), parts in self._fragments.items()
        ]
        self._fragments, self._load = {}, defaultdict(float)
        return segments


@dataclass(frozen=True)
class _Limits:
    """What a rank may pack for one exchange.

    Args:
        nodes: of the data-parallel ranks.
        max_elements: the limit.
        all_receive_weights: whether all ranks get what the owners send back (backward regime).
    """

    nodes: Nodes
    max_elements: int
    all_receive_weights: bool

    def copies(self, holders: tuple[int, ...]) -> Mapping[_Buffer, float]:
        """What the buffers of all ranks hold of a segment, in elements per element of it."""
        return _copies(self.nodes, holders, self.all_receive_weights)


@cache
def copies(nodes: Nodes, holders: tuple[int, ...], receivers: Receivers) -> dict[_Buffer, float]:
    """What the buffers of all ranks that have a part in a segment hold of it, in elements per element of it; those of
    holders at least all of it, as if they packed what they own."""
    length = 1000 * _ALIGNMENT * len(holders)  # so that shards are even
    whole = Fragment(Piece("", None, 0, length), 0, length)
    segment = Segment(NOT_OPTIMIZED, None, holders, (whole,), nodes.shard_order(holders))
    slices = carriers(segment, nodes, receivers)
    asking = [bool(part) and not (receivers == "others" and segment.held_by(part[0][0])) for part in slices]
    found: dict[_Buffer, int] = {(rank, "held"): length for rank in holders}
    for node, (ranks, part) in enumerate(zip(nodes.ranks, slices, strict=True)):
        getting = [rank for rank in ranks if receives(segment, rank, receivers)]
        own = {carrier: stop - start for carrier, start, stop in part}
        for rank in dict.fromkeys([*own, *getting]):
            start, stop = segment.owned_range(rank)
            found[rank, "sent inside"] = own.get(rank, 0) * (len(getting) - (rank in getting))
            found[rank, "sent between"] = (stop - start) * (sum(asking) - asking[node])
            found[rank, "received inside"] = (length - own.get(rank, 0)) * (rank in getting)
            found[rank, "received between"] = own.get(rank, 0) * asking[node]
    return {buffer: amount / length for buffer, amount in found.items() if amount}


def receives(segment: Segment, rank: int, receivers: Receivers) -> bool:
    """Whether `rank` is among the receivers of what the owners of `segment` send back."""
    if receivers == "all":
        return True
    return segment.held_by(rank) == (receivers == "holders")


def carriers(segment: Segment, nodes: Nodes, receivers: Receivers) -> list[list[tuple[int, int, int]]]:
    """For each node the ranks that carry the segment for it, each with start and stop of its slice.

    Its holders, or all ranks of a node without holders that needs it nonetheless.
    """
    return [
        segment.slices(own or (() if receivers == "holders" else ranks))
        for ranks, own in zip(nodes.ranks, nodes.per_node(segment.owners), strict=True)
    ]


@cache
def _copies(nodes: Nodes, holders: tuple[int, ...], all_receive_weights: bool) -> dict[_Buffer, float]:
    there = copies(nodes, holders, "holders")
    back = copies(nodes, holders, "all") if all_receive_weights else {}
    return {buffer: max(there.get(buffer, 0.0), back.get(buffer, 0.0)) for buffer in {**there, **back}}


def default_bucket_elements(tensors: Sequence[TensorInfo], plan: Plan) -> int:
    """The limit where the config has none: messages of a megabyte or so to each holder, but few buckets.

    Smaller messages would be all latency, larger ones memory: what is packed exists twice, and overlap waits for it.
    """
    held = [0] * len(plan.subnetwork_of_rank)
    shapes = {(info.kind, info.name): info.shape for info in tensors}
    for tensor, pieces in pieces_by_tensor(tensors, plan).items():
        for piece, holders in pieces:
            for rank in holders:
                held[rank] += piece.num_elements(shapes[tensor])
    num_holders = plan.num_holders * len(held) // plan.num_subnetworks  # of a unit, replicas included
    return max(num_holders * _MESSAGE, -(-max(held) // _NUM_BUCKETS))


def build_segments(
    tensors: Sequence[TensorInfo], plan: Plan, *, max_elements: int, nodes: Nodes | None = None
) -> list[Segment]:
    """All segments, in one order on all ranks: that in which backward finishes gradients.

    The model is cut into windows from its end to its beginning, each with one segment per param group and holder set,
    so that a bucket is complete as soon as backward has passed its part of the model.

    Args:
        tensors: dense tensors in model order.
        max_elements: no rank packs more for one window. In the backward regime an owner packs its shard for every other
            rank of its node, and for every other node.
        nodes: of the data-parallel ranks; None if they are on one.
    """
    limits = _Limits(nodes or Nodes.one(len(plan.subnetwork_of_rank)), max_elements, plan.regime == "backward")
    windows: dict[str, _Window] = {}
    dtypes = {str(info.dtype): info.dtype for info in tensors}
    by_name = pieces_by_tensor(tensors, plan)
    segments: list[Segment] = []
    for info in reversed(tensors):
        window = windows.setdefault(str(info.dtype), _Window(limits))
        for piece, holders in by_name[info.kind, info.name]:
            rest: Fragment | None = Fragment(piece, 0, piece.num_elements(info.shape))
            while rest is not None and rest.start < rest.stop:
                rest = window.add(info.group, holders, rest)
                if rest is not None:
                    segments.extend(window.close(info.dtype))
    for dtype, window in windows.items():
        segments.extend(window.close(dtypes[dtype]))
    return segments


def build_buckets(
    segments: Sequence[Segment], nodes: Nodes, *, max_elements: int, all_receive_weights: bool = False
) -> list[Bucket]:
    """Consecutive segments of one dtype, so that no rank packs more than `max_elements` for one collective.

    Args:
        nodes: of the data-parallel ranks.
        all_receive_weights: whether all ranks get what the owners send back (backward regime).
    """
    limits = _Limits(nodes, max_elements, all_receive_weights)
    groups: list[list[Segment]] = []
    load: defaultdict[_Buffer, float] = defaultdict(float)
    for segment in segments:
        amounts = {buffer: segment.num_elements * n for buffer, n in limits.copies(segment.holders).items()}
        fits = groups and groups[-1][0].dtype == segment.dtype
        fits = fits and all(load[buffer] + amount <= max_elements for buffer, amount in amounts.items())
        if not fits:
            groups.append([])
            load = defaultdict(float)
        groups[-1].append(segment)
        for buffer, amount in amounts.items():
            load[buffer] += amount
    return [Bucket(index, tuple(group)) for index, group in enumerate(groups)]
