"""The model cut into segments and buckets, so that no rank packs more than a limit for one collective.

Everything here is computed from the plan and the dense shapes alone, so all ranks build the same segments and buckets
in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import ALIGNMENT, LARGE, Segment, carriers, receives
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Piece

_MESSAGE, _NUM_BUCKETS = 500_000, 16  # elements, buckets

_Buffer = tuple[int, str]  # a rank, and what it is for


@dataclass(frozen=True)
class Bucket:
    """Segments of one dtype that share one pair of collectives."""

    index: int
    segments: tuple[Segment, ...]

    @cached_property
    def has_large_shards(self) -> bool:
        """Whether messages begin at multiples of 16 bytes; the same on all ranks."""
        return any(segment.num_elements >= LARGE * len(segment.holders) for segment in self.segments)


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
    length = 1000 * ALIGNMENT * len(holders)  # so that shards are even
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
