"""The flat layout of the exchange: segments, buckets, and who owns which shard.

A segment is a flat stretch of pieces that share an optimizer param group, a dtype and a holder set. It
is cut into one shard per holder; a shard's owner averages it and steps it. Everything here is computed
from the plan and the dense shapes alone, so all ranks build the same segments in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor


@dataclass(frozen=True)
class Segment:
    """Fragments that travel together: one param group, one dtype, one holder set.

    Args:
        holders: ranks of the data-parallel group, ascending; shard i belongs to holders[i].
    """

    group: int
    dtype: Any
    holders: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    num_elements: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_elements", sum(fragment.num_elements for fragment in self.fragments))

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.holders)}

    def held_by(self, rank: int) -> bool:
        return rank in self._position

    def owned_range(self, rank: int) -> tuple[int, int]:
        """Start and stop (elements) of the shard that `rank` owns; empty when it holds nothing here."""
        index = self._position.get(rank)
        if index is None:
            return 0, 0
        length = -(-self.num_elements // len(self.holders))
        return min(index * length, self.num_elements), min((index + 1) * length, self.num_elements)

    def split(self, length: int) -> Iterator[Segment]:
        """This segment as segments of at most `length` elements."""
        for start in range(0, self.num_elements, max(1, length)):
            fragments = tuple(self.cut(start, min(start + max(1, length), self.num_elements)))
            yield Segment(self.group, self.dtype, self.holders, fragments)

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


@dataclass(frozen=True)
class Bucket:
    """Segments of one dtype that share one pair of collectives."""

    index: int
    segments: tuple[Segment, ...]


class _Window:
    """A stretch of the model, of one dtype, that fits into one bucket: no rank packs more than the limit for it.

    Args:
        size: number of data-parallel ranks.
        max_elements: the limit.
        all_receive_weights: whether an owner packs its shard for every other rank (backward regime).
    """

    def __init__(self, size: int, max_elements: int, all_receive_weights: bool) -> None:
        self._size, self._max_elements, self._all_receive_weights = size, max_elements, all_receive_weights
        self._fragments: dict[tuple[int, tuple[int, ...]], list[Fragment]] = {}
        self._load = [0.0] * size

    def add(self, group: int, holders: tuple[int, ...], fragment: Fragment) -> Fragment | None:
        """Take as much of `fragment` as fits; what is left of it, None if nothing is."""
        copies = _copies(len(holders), self._size) if self._all_receive_weights else 1.0
        room = int((self._max_elements - max(self._load[rank] for rank in holders)) / copies)
        if room < 1 and self._fragments:
            return fragment
        stop = min(fragment.stop, fragment.start + max(1, room))
        self._fragments.setdefault((group, holders), []).append(Fragment(fragment.piece, fragment.start, stop))
        for rank in holders:
            self._load[rank] += (stop - fragment.start) * copies
        return Fragment(fragment.piece, stop, fragment.stop) if stop < fragment.stop else None

    def close(self, dtype: Any) -> list[Segment]:
        """Its segments; the window is empty again."""
        segments = [Segment(group, dtype, holders, tuple(parts)) for (group, holders), parts in self._fragments.items()]
        self._fragments, self._load = {}, [0.0] * self._size
        return segments


def build_segments(tensors: Sequence[TensorInfo], plan: Plan, *, max_elements: int) -> list[Segment]:
    """All segments, in one order on all ranks: that in which backward finishes gradients.

    The model is cut into windows from its end to its beginning, each with one segment per param group and holder set,
    so that a bucket is complete as soon as backward has passed its part of the model.

    Args:
        tensors: dense tensors in model order.
        max_elements: no rank packs more for one window. In the backward regime an owner packs its shard for every other
            rank.
    """
    windows: dict[str, _Window] = {}
    dtypes = {str(info.dtype): info.dtype for info in tensors}
    by_name = pieces_by_tensor(tensors, plan)
    segments: list[Segment] = []
    for info in reversed(tensors):
        new = _Window(len(plan.subnetwork_of_rank), max_elements, plan.regime == "backward")
        window = windows.setdefault(str(info.dtype), new)
        for piece, holders in by_name[info.kind, info.name]:
            rest: Fragment | None = Fragment(piece, 0, piece.num_elements(info.shape))
            while rest is not None and rest.start < rest.stop:
                rest = window.add(info.group, holders, rest)
                if rest is not None:
                    segments.extend(window.close(info.dtype))
    for dtype, window in windows.items():
        segments.extend(window.close(dtypes[dtype]))
    return segments


def _copies(num_holders: int, size: int) -> float:
    """The most that a rank packs or unpacks when all ranks get a segment, in elements per element."""
    return max(1.0, (size - 1) / num_holders)


def build_buckets(
    segments: Sequence[Segment], *, size: int, max_elements: int, all_receive_weights: bool = False
) -> list[Bucket]:
    """Consecutive segments of one dtype, so that no rank packs more than `max_elements` for one exchange.

    Args:
        size: number of data-parallel ranks.
        all_receive_weights: whether all ranks get what the owners send back (backward regime). No rank receives more
            than the owners pack, so that their loads bound what all ranks unpack.
    """
    groups: list[list[Segment]] = []
    load: list[float] = [0] * size
    for segment in segments:
        amount = segment.num_elements * (_copies(len(segment.holders), size) if all_receive_weights else 1.0)
        fits = groups and groups[-1][0].dtype == segment.dtype
        fits = fits and all(load[rank] + amount <= max_elements for rank in segment.holders)
        if not fits:
            groups.append([])
            load = [0] * size
        groups[-1].append(segment)
        for rank in segment.holders:
            load[rank] += amount
    return [Bucket(index, tuple(group)) for index, group in enumerate(groups)]
