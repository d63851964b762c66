"""Buckets: slices with the same holders, param group and dtype in one flat buffer.

`plan_buckets` is a pure function of facts that all ranks share, so every rank computes the same list, buckets of other
holders included, and its order is the order of collectives (optimizer.py). `Bucket` is one rank's memory for one of
them.

Buckets are cut at common depth boundaries. A holder set's slices may span the whole model (with neurons every set
touches every layer), and a bucket is complete only when the gradient of its first layer is there; without boundaries
nothing would overlap with backward, and ZeRO stage 2 would keep all gradients.

Whole tensors need no packing: they are views of their bucket's flat weight buffer, their gradients are views of its
flat gradient buffer. The slices of a cut tensor have several holder sets, so they are copied to and from flat buffers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sdp_deepspeed.core.parallel.groups import HolderGroup, Holders
from sdp_deepspeed.units import Piece

Pieces = Mapping[str, Sequence[tuple[Piece, Holders]]]


class Slice(NamedTuple):
    """A piece of a dense tensor in a bucket.

    Args:
        start: its first element in the bucket.
        shape: of the slice; its elements lie in row-major order.
    """

    piece: Piece
    start: int
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BucketLayout:
    """What a bucket has, the same on all ranks.

    Args:
        depth_range: 0 for the range whose gradients are ready first, that of the last layers.
        holders: data-parallel indices.
        param_group: index of the optimizer's param group.
        dtype: of the weights.
        is_whole: whether the slices are whole tensors; else they are parts of cut ones.
        is_replicated: whether all tensor-parallel ranks have the same values.
        slices: in the order in which their gradients become ready.
    """

    depth_range: int
    holders: Holders
    param_group: int
    dtype: torch.dtype
    is_whole: bool
    is_replicated: bool
    slices: tuple[Slice, ...]

    @property
    def num_elements(self) -> int:
        last = self.slices[-1]
        return last.start + last.num_elements

    @property
    def shard_size(self) -> int:
        """Elements that each holder owns, padding included."""
        return -(-self.num_elements // len(self.holders))

    @property
    def size(self) -> int:
        """Elements of the flat buffer: `num_elements`, and zeros up to a multiple of the number of holders."""
        return self.shard_size * len(self.holders)

    def owned(self, position: int) -> Iterator[tuple[Slice, int, int]]:
        """Parts of slices in the shard of the holder at `position`: slice, first and end element within the slice."""
        first, end = position * self.shard_size, (position + 1) * self.shard_size
        for part in self.slices:
            start, stop = max(first - part.start, 0), min(end - part.start, part.num_elements)
            if start < stop:
                yield part, start, stop


def plan_buckets(
    pieces: Pieces,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    param_groups: Mapping[str, int],
    *,
    bucket_size: int,
    replicated: Collection[str] = (),
) -> list[BucketLayout]:
    """All buckets of the model in the static global order of their collectives.

    Args:
        pieces: of each dense tensor with the holders of each, in the order in which the forward pass uses tensors.
        shapes: of the dense tensors.
        dtypes: of the weights.
        param_groups: index of the param group of each tensor that is trained; others are in no bucket.
        bucket_size: elements that a rank holds in one depth range, at most, unless a single tensor has more.
        replicated: tensors that are equal on all tensor-parallel ranks.
    """
    backward_order = [name for name in reversed([*pieces]) if name in param_groups]
    ranges = _depth_ranges(backward_order, pieces, shapes, bucket_size)
    layouts: list[BucketLayout] = []
    for depth_range, names in enumerate(ranges):
        members: defaultdict[tuple[Any, ...], list[tuple[int, Piece]]] = defaultdict(list)
        for depth, name in enumerate(names):
            for piece, holders in pieces[name]:
                is_whole = piece.dim is None
                key = holders, param_groups[name], dtypes[name], is_whole, name in replicated
                members[key].append((depth, piece))
        in_order = sorted(members.items(), key=lambda item: (item[1][-1][0], *item[0][:2], str(item[0][2:])))
        layouts += [
            BucketLayout(depth_range, *key, _slices([piece for _, piece in found], shapes))  # type: ignore[call-arg]
            for key, found in in_order
        ]
    return layouts


def _depth_ranges(
    names: Sequence[str], pieces: Pieces, shapes: Mapping[str, Sequence[int]], bucket_size: int
) -> list[list[str]]:
    """Consecutive tensors of which no rank holds more than `bucket_size` elements."""
    ranges: list[list[str]] = []
    load: defaultdict[int, int] = defaultdict(int)  # elements by rank
    for name in names:
        own: defaultdict[int, int] = defaultdict(int)
        for piece, holders in pieces[name]:
            size = piece.num_elements(shapes[name])
            for rank in holders:
                own[rank] += size
        if not ranges or any(load[rank] + size > bucket_size for rank, size in own.items()):
            ranges.append([])
            load.clear()
        ranges[-1].append(name)
        for rank, size in own.items():
            load[rank] += size
    return ranges


def _slices(pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    start = 0
    for piece in pieces:
        dense = shapes[piece.parameter]
        shape = tuple(piece.length if dim == piece.dim else size for dim, size in enumerate(dense))
        slices.append(Slice(piece, start, shape))
        start += slices[-1].num_elements
    return tuple(slices)


class Bucket:
    """One rank's memory for a bucket.

    Args:
        layout: the bucket.
        group: the holders; None if this rank is none of them and only receives weights (backward regime).
        owns_all: whether this rank's optimizer steps all of it, and not only a shard (stage 0).

    Attributes:
        weights: flat [size] in the weights' dtype.
        gradients: flat [size] in the dtype in which gradients are summed.
        weight_slots, gradient_slots: of each slice its view into these, in the slice's shape.
        filled: for each slice whether its slot has the sum of this step's gradients so far.
        waits_for: names of tensors whose gradients have not come in this backward pass.
        shard: what the optimizer steps: fp32, flat, a view of `weights` where that is possible.
        gradient: the average for `shard`, once it is there.
    """

    def __init__(self, layout: BucketLayout, group: HolderGroup | None, *, owns_all: bool) -> None:
        self.layout, self.group, self.owns_all = layout, group, owns_all
        self.names = list(dict.fromkeys(part.piece.parameter for part in layout.slices))
        self.waits_for = set(self.names)
        self.filled = [False] * len(layout.slices)
        self.shard: torch.nn.Parameter | None = None
        self.gradient: torch.Tensor | None = None

    def place_weights(self, buffer: torch.Tensor) -> None:
        self.weights = buffer[: self.layout.size]
        self.weight_slots = self._slots(buffer)

    def place_gradients(self, buffer: torch.Tensor) -> None:
        self.gradients = buffer[: self.layout.size]
        self.gradient_slots = self._slots(buffer)

    def _slots(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[s.start : s.start + s.num_elements].view(s.shape) for s in self.layout.slices]

    def shard_of(self, flat: torch.Tensor, position: int | None = None) -> torch.Tensor:
        """The part of a flat buffer that one holder owns, by default this one."""
        if position is None:
            assert self.group is not None
            position = self.group.position
        size = self.layout.shard_size
        return flat[position * size : (position + 1) * size]

    def stepped_part(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a flat buffer that this rank's optimizer steps."""
        return flat if self.owns_all else self.shard_of(flat)

    def load_weights(self, view: Callable[[Piece], torch.Tensor]) -> None:
        """Fill `weights` from the module's tensors."""
        self.weights[self.layout.num_elements :].zero_()
        torch._foreach_copy_(self.weight_slots, [view(part.piece) for part in self.layout.slices])

    def make_shard(self) -> None:
        """Create `shard` from `weights`; for cut tensors and low precision it is a copy."""
        dtype = torch.promote_types(self.layout.dtype, torch.float32)
        values = self.stepped_part(self.weights)
        is_view = self.layout.is_whole and dtype == values.dtype
        self.shard = torch.nn.Parameter(values if is_view else values.to(dtype, copy=True))

    def store_shard(self) -> None:
        """Round `shard` into `weights`."""
        assert self.shard is not None
        part = self.stepped_part(self.weights)
        if part.data_ptr() != self.shard.data_ptr():
            part.copy_(self.shard.detach())

    def store_weights(self, view: Callable[[Piece], torch.Tensor]) -> None:
        """Copy `weights` into cut tensors; whole ones are views of it."""
        if not self.layout.is_whole:
            torch._foreach_copy_([view(part.piece) for part in self.layout.slices], self.weight_slots)
