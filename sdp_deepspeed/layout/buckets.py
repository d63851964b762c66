"""The model cut into segments and buckets, so that no rank packs more than a limit for one collective.

Everything here is computed from the plan and the dense shapes alone, so all ranks build the same segments and buckets
in the same order.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from sdp_deepspeed.layout.fragments import Fragment, num_elements
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.owners import sole_owners
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
        return any(segment.num_elements >= LARGE * segment.num_shards for segment in self.segments)


class _Kind(NamedTuple):
    """What the fragments of a segment have in common.

    Args:
        whole: the tensor, and who owns it, where one rank steps all of it; such a segment has nothing else.
    """

    group: int
    holders: tuple[int, ...]
    whole: tuple[Piece, int] | None = None

    @property
    def sole_owner(self) -> int | None:
        return None if self.whole is None else self.whole[1]


class _Window:
    """A stretch of the model, of one dtype, that fits into one bucket: no rank packs more than the limit for it.

    Whole tensors wait until there are some for all owners: each packs its own for all others, so one at a time would
    leave the rest idle. In the order of its owner, one that is cut by the limit goes on where the next window begins.
    When they leave depends on the plan and on shapes alone, whatever a rank holds of them: all ranks agree.

    Args:
        limits: what a rank may pack.
        max_waiting: elements of a rank that wait; more leave early, though some owners then send nothing.
        numbers: of windows, none twice.
    """

    def __init__(self, limits: _Limits, max_waiting: float, numbers: Iterator[int]) -> None:
        self._limits, self._max_waiting, self._numbers = limits, max_waiting, numbers
        self._fragments: dict[_Kind, list[Fragment]] = {}
        self._load: defaultdict[_Buffer, float] = defaultdict(float)
        self._waiting: dict[int, deque[tuple[_Kind, Fragment]]] = {}  # by owner
        self._kept: defaultdict[int, int] = defaultdict(int)  # elements that wait, by rank

    @property
    def is_full_of_waiting(self) -> bool:
        """Whether as many tensors wait as there are ranks, or as many elements as may."""
        num_tensors = sum(map(len, self._waiting.values()))
        return num_tensors >= len(self._limits.nodes.of_rank) or max(self._kept.values()) >= self._max_waiting

    def add(self, kind: _Kind, fragment: Fragment) -> Fragment | None:
        """Take as much of `fragment` as fits; what is left of it, None if nothing is."""
        copies = self._limits.copies(kind.holders, kind.sole_owner)
        room = min(int((self._limits.max_elements - self._load[buffer]) / n) for buffer, n in copies.items())
        if room < 1 and self._fragments:
            return fragment
        stop = min(fragment.stop, fragment.start + max(1, room))
        self._fragments.setdefault(kind, []).append(Fragment(fragment.piece, fragment.start, stop))
        for buffer, n in copies.items():
            self._load[buffer] += (stop - fragment.start) * n
        return Fragment(fragment.piece, stop, fragment.stop) if stop < fragment.stop else None

    def wait(self, kind: _Kind, fragment: Fragment) -> None:
        """A whole tensor is coming."""
        assert kind.sole_owner is not None
        self._waiting.setdefault(kind.sole_owner, deque()).append((kind, fragment))
        for rank in kind.holders:
            self._kept[rank] += fragment.num_elements

    def close(self, dtype: Any) -> list[Segment]:
        """Its segments; the window is empty again."""
        order, number = self._limits.nodes.shard_order, next(self._numbers)
        segments = [
            Segment(kind.group, dtype, kind.holders, tuple(parts), order(kind.holders), kind.sole_owner, number)
            for kind, parts in self._fragments.items()
        ]
        self._fragments, self._load = {}, defaultdict(float)
        return segments

    def flush(self, dtype: Any) -> list[Segment]:
        """Segments of windows that are full of what waits. If it is too much for one, each gets an equal part of what
        every owner has, and none stays open: windows of another dtype may come between that and the next one."""
        segments, limit = list[Segment](), self._limits.max_elements
        coming = self._waiting_load()
        num_windows = max(1, math.ceil(max(coming.values(), default=0) / limit))
        if self._fragments and any(self._load[buffer] + n / num_windows > limit for buffer, n in coming.items()):
            segments.extend(self.close(dtype))
        sizes = {owner: num_elements(fragment for _, fragment in queue) for owner, queue in self._waiting.items()}
        quotas = {owner: -(-size // num_windows) for owner, size in sizes.items()}
        while self._take_waiting(quotas):
            segments.extend(self.close(dtype))
            num_windows += 1
        self._kept.clear()
        return segments if num_windows == 1 else segments + self.close(dtype)

    def _waiting_load(self) -> dict[_Buffer, float]:
        load: defaultdict[_Buffer, float] = defaultdict(float)
        for kind, fragment in itertools.chain(*self._waiting.values()):
            for buffer, n in self._limits.copies(kind.holders, kind.sole_owner).items():
                load[buffer] += fragment.num_elements * n
        return load

    def _take_waiting(self, quotas: Mapping[int, int]) -> bool:
        """Take of every owner's tensors so many elements, or as many as fit; whether anything is left."""
        for owner, queue in self._waiting.items():
            left = quotas[owner]
            while queue and left:
                kind, fragment = queue.popleft()
                middle = min(fragment.start + left, fragment.stop)
                rest = self.add(kind, Fragment(fragment.piece, fragment.start, middle))
                start = middle if rest is None else rest.start
                left = left - (start - fragment.start) if rest is None else 0
                if start < fragment.stop:
                    queue.appendleft((kind, Fragment(fragment.piece, start, fragment.stop)))
        self._waiting = {owner: queue for owner, queue in self._waiting.items() if queue}
        return bool(self._waiting)


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

    def copies(self, holders: tuple[int, ...], sole_owner: int | None) -> Mapping[_Buffer, float]:
        """What the buffers of all ranks hold of a segment, in elements per element of it."""
        return _copies(self.nodes, holders, self.all_receive_weights, sole_owner)


@cache
def copies(
    nodes: Nodes, holders: tuple[int, ...], receivers: Receivers, sole_owner: int | None = None
) -> dict[_Buffer, float]:
    """What the buffers of all ranks that have a part in a segment hold of it, in elements per element of it; those of
    holders at least all of it, as if they packed what they own."""
    length = 1000 * ALIGNMENT * len(holders)  # so that shards are even
    whole = Fragment(Piece("", None, 0, length), 0, length)
    segment = Segment(NOT_OPTIMIZED, None, holders, (whole,), nodes.shard_order(holders), sole_owner)
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
def _copies(
    nodes: Nodes, holders: tuple[int, ...], all_receive_weights: bool, sole_owner: int | None
) -> dict[_Buffer, float]:
    there = copies(nodes, holders, "holders", sole_owner)
    back = copies(nodes, holders, "all", sole_owner) if all_receive_weights else {}
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
    num_holders = max(map(len, plan.holders)) * len(held) // plan.num_subnetworks  # of a unit, replicas included
    return max(num_holders * _MESSAGE, -(-max(held) // _NUM_BUCKETS))


def build_segments(
    tensors: Sequence[TensorInfo],
    plan: Plan,
    *,
    max_elements: int,
    nodes: Nodes | None = None,
    max_waiting: float = math.inf,
) -> list[Segment]:
    """All segments, in one order on all ranks: that in which backward finishes gradients.

    The model is cut into windows from its end to its beginning, each with one segment per param group and holder set,
    so that a bucket is complete as soon as backward has passed its part of the model. A whole tensor is a segment of
    its own, or several in windows that follow each other.

    Args:
        tensors: dense tensors in model order.
        max_elements: no rank packs more for one window. In the backward regime an owner packs its shard for every other
            rank of its node, and for every other node.
        nodes: of the data-parallel ranks; None if they are on one.
        max_waiting: elements of a rank in whole tensors that wait for others, beside the last one.
    """
    limits = _Limits(nodes or Nodes.one(len(plan.subnetwork_of_rank)), max_elements, plan.regime == "backward")
    windows: dict[str, _Window] = {}
    numbers = itertools.count()
    dtypes = {str(info.dtype): info.dtype for info in tensors}
    by_name, owners = pieces_by_tensor(tensors, plan), sole_owners(tensors, plan)
    segments: list[Segment] = []
    for info in reversed(tensors):
        window = windows.setdefault(str(info.dtype), _Window(limits, max_waiting, numbers))
        for piece, holders in by_name[info.kind, info.name]:
            rest: Fragment | None
            rest = whole = Fragment(piece, 0, piece.num_elements(info.shape))
            if piece in owners:
                window.wait(_Kind(info.group, holders, (piece, owners[piece])), whole)
                segments.extend(window.flush(info.dtype) if window.is_full_of_waiting else [])
                continue
            while rest is not None and rest.start < rest.stop:
                rest = window.add(_Kind(info.group, holders), rest)
                if rest is not None:
                    segments.extend(window.close(info.dtype))
    for dtype, window in windows.items():
        segments.extend(window.flush(dtypes[dtype]) + window.close(dtypes[dtype]))
    return segments


def build_buckets(
    segments: Sequence[Segment], nodes: Nodes, *, max_elements: int, all_receive_weights: bool = False
) -> list[Bucket]:
    """Consecutive windows of one dtype, so that no rank packs more than `max_elements` for one collective. A part of a
    window would leave as late as the rest, and what is before it too.

    Args:
        segments: of windows that fit.
        nodes: of the data-parallel ranks.
        all_receive_weights: whether all ranks get what the owners send back (backward regime).
    """
    limits = _Limits(nodes, max_elements, all_receive_weights)
    groups: list[list[Segment]] = []
    load: defaultdict[_Buffer, float] = defaultdict(float)
    for _, of_window in itertools.groupby(segments, key=lambda segment: segment.window):
        window, amounts = list(of_window), defaultdict[_Buffer, float](float)
        for segment in window:
            for buffer, n in limits.copies(segment.holders, segment.sole_owner).items():
                amounts[buffer] += segment.num_elements * n
        fits = groups and groups[-1][0].dtype == window[0].dtype
        fits = fits and all(load[buffer] + amount <= max_elements for buffer, amount in amounts.items())
        if not fits:
            groups.append([])
            load = defaultdict(float)
        groups[-1].extend(window)
        for buffer, amount in amounts.items():
            load[buffer] += amount
    return [Bucket(index, tuple(group)) for index, group in enumerate(groups)]
