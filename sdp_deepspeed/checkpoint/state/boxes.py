"""Where pieces lie in the dense model: boxes of its tensors, which is what checkpoints are keyed by.

Pure: knows neither DeepSpeed nor torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from sdp_deepspeed.plan.shards import Shards
from sdp_deepspeed.units import Piece

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a dense tensor: index `offsets[d]` up to `offsets[d] + sizes[d]` of each dim."""

    offsets: Sizes
    sizes: Sizes

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def overlap(self, other: Box) -> Box | None:
        """What both have of the same tensor; None if that is nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(map(min, self._stops, other._stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def without(self, inner: Box) -> Iterator[Box]:
        """The rest of it, in boxes that do not overlap.

        Args:
            inner: a part of it.
        """
        left = self
        for dim, (start, stop) in enumerate(zip(inner.offsets, inner._stops, strict=True)):
            before, after = start - left.offsets[dim], left._stops[dim] - stop
            if before:
                yield Box(left.offsets, _with(left.sizes, dim, before))
            if after:
                yield Box(_with(left.offsets, dim, stop), _with(left.sizes, dim, after))
            left = Box(_with(left.offsets, dim, start), _with(left.sizes, dim, stop - start))

    @property
    def _stops(self) -> Sizes:
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices of a tensor that has the elements of `outer`."""
        starts = [own - other for own, other in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


def box_of(piece: Piece, shape: Sequence[int]) -> Box:
    """All of a piece of a tensor of `shape`."""
    whole = Box.whole(shape)
    if piece.dim is None:
        return whole
    return Box(_with(whole.offsets, piece.dim, piece.start), _with(whole.sizes, piece.dim, piece.length))


def in_dense(box: Box, piece: Piece, shards: Shards) -> Box:
    """A box of what a tensor-parallel rank has of a tensor, in the dense model."""
    division = shards.division_of(piece)
    if division is None:
        return box
    before = sum(division.lengths[: shards.index])
    return replace(box, offsets=_with(box.offsets, division.dim, box.offsets[division.dim] + before))


def _with(sizes: Sizes, dim: int, value: int) -> Sizes:
    return (*sizes[:dim], value, *sizes[dim + 1 :])
