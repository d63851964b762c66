"""Buckets: slices with the same holders, param group and dtype in one flat buffer.

`plan_buckets` is a pure function of facts that all ranks share, so every rank computes the same list, buckets of other
holders included, and its order is the order of collectives (optimizer.py). `Bucket` is one rank's memory for one of
them.

Buckets are cut at common depth boundaries. A holder set's slices may span the whole model (with neurons every set
touches every layer), and a bucket is complete only when the gradient of its first layer is there; without boundaries
nothing would overlap with backward, and ZeRO stage 2 would keep all gradients.

Whole tensors need no packing: they are views of their bucket's flat weight buffer, their gradients are views of its
flat gradient buffer. The slices of a cut tensor have several holder sets, so they are copied to and from flat buffers.

An optimizer that updates each tensor as a whole (Muon) cannot step a shard of equal size. Its tensors are dealt to the
holders, each bucket has those of one owner, which receives their gradients and sends their weights.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from sdp_deepspeed.parallel.groups import HolderGroup, Holders
from sdp_deepspeed.parallel.offload import HostShard
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
        owner: data-parallel index of the holder that steps all of it, for an optimizer of whole tensors; None if each
            holder steps a shard.
        slices: in the order in which their gradients become ready.
    """

    depth_range: int
    holders: Holders
    param_group: int
    dtype: torch.dtype
    is_whole: bool
    is_replicated: bool
    owner: int | None
    slices: tuple[Slice, ...]

    @cached_property
    def num_elements(self) -> int:
        last = self.slices[-1]
        return last.start + last.num_elements

    @property
    def num_shards(self) -> int:
        return 1 if self.owner is not None else len(self.holders)

    @cached_property
    def size(self) -> int:
        """Elements of the flat buffer: `num_elements`, and zeros up to what shards of equal size need."""
        return -(-self.num_elements // self.num_shards) * self.num_shards

    def shard_range(self, position: int) -> tuple[int, int]:
        """First and end element of what the holder at `position` owns, padding included."""
        if self.owner is not None:
            return 0, self.size if self.holders[position] == self.owner else 0
        size = self.size // self.num_shards
        return position * size, (position + 1) * size

    def owned(self, position: int) -> Iterator[tuple[Slice, int, int]]:
        """Parts of slices in the shard of the holder at `position`: slice, first and end element within the slice."""
        first, end = self.shard_range(position)
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
    bucket_size: int | None = None,
    replicated: Collection[str] = (),
    stepped_whole: Collection[str] = (),
) -> list[BucketLayout]:
    """All buckets of the model in the static global order of their collectives.

    Args:
        pieces: of each dense tensor with the holders of each, in the order in which the forward pass uses tensors.
        shapes: of the dense tensors.
        dtypes: of the weights.
        param_groups: index of the param group of each tensor that is trained; others are in no bucket.
        bucket_size: elements that a rank holds in one depth range, at most, unless a single tensor has more. Default:
            50 million, or a sixteenth of what a rank holds where that is more, since a rank has a bucket of each holder
            set that it is in for every depth range.
        replicated: tensors that are equal on all tensor-parallel ranks.
        stepped_whole: tensors that one rank's optimizer must step as a whole; none of them is cut.
    """
    owners = _deal({name: pieces[name][0] for name in pieces if name in param_groups and name in stepped_whole})
    backward_order = [name for name in reversed([*pieces]) if name in param_groups]
    ranges = _depth_ranges(backward_order, pieces, shapes, bucket_size)
    layouts: list[BucketLayout] = []
    for depth_range, names in enumerate(ranges):
        members: defaultdict[tuple[Any, ...], list[tuple[int, Piece]]] = defaultdict(list)
        for depth, name in enumerate(names):
            for piece, holders in pieces[name]:
                is_whole = piece.dim is None
                key = holders, param_groups[name], dtypes[name], is_whole, name in replicated, owners.get(name)
                members[key].append((depth, piece))
        in_order = sorted(members.items(), key=lambda item: (item[1][-1][0], *item[0][:2], str(item[0][2:])))
        layouts += [
            BucketLayout(depth_range, *key, _slices([piece for _, piece in found], shapes))  # type: ignore[call-arg]
            for key, found in in_order
        ]
    return layouts


def _depth_ranges(
    names: Sequence[str], pieces: Pieces, shapes: Mapping[str, Sequence[int]], bucket_size: int | None
) -> list[list[str]]:
    """Consecutive tensors of which no rank holds more than `bucket_size` elements."""
    held: dict[str, Counter[int]] = {name: Counter() for name in names}  # elements by rank
    for name in names:
        for piece, holders in pieces[name]:
            held[name].update(dict.fromkeys(holders, piece.num_elements(shapes[name])))
    if bucket_size is None:
        total = sum(held.values(), Counter[int]())
        bucket_size = max(50_000_000, max(total.values(), default=0) // 16)
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
    """The owner of each whole tensor: the largest first, to the holder that has the fewest elements so far."""
    load: defaultdict[int, int] = defaultdict(int)
    owners = {}
    for name, (piece, holders) in sorted(tensors.items(), key=lambda item: -item[1][0].length):
        owners[name] = min(holders, key=lambda rank: (load[rank], rank))
        load[owners[name]] += piece.length
    return owners


def _slices(pieces: Sequence[Piece], shapes: Mapping[str, Sequence[int]]) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    start = 0
    for piece in pieces:
        dense = shapes[piece.parameter]
        shape = tuple(piece.length if dim == piece.dim else size for dim, size in enumerate(dense))
        slices.append(Slice(piece, start, shape))
        start += slices[-1].num_elements
    return tuple(slices)


def row_major_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, stop) in row-major order as boxes (first index, sizes), in this order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row, inner = math.prod(shape[1:]), tuple(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        for offsets, sizes in row_major_boxes(inner, start - first * row, stop - first * row):
            yield (first, *offsets), (1, *sizes)
        return
    low, high = -(-start // row), stop // row
    yield from row_major_boxes(shape, start, low * row)
    if low < high:
        yield (low, *(0 for _ in inner)), (high - low, *inner)
    yield from row_major_boxes(shape, high * row, stop)


class ShardPart(NamedTuple):
    """Elements `start` to `stop` of a slice, in what an optimizer steps.

    Args:
        parameter: what the optimizer steps.
        first: where they begin in it; flat.
    """

    slice: Slice
    start: int
    stop: int
    parameter: nn.Parameter
    first: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements in the parameter, or in a tensor that is laid out like it; flat, a view."""
        return tensor.detach().view(-1)[self.first : self.first + self.stop - self.start]

    @property
    def piece(self) -> Piece:
        return self.slice.piece

    def boxes(self, tensor: torch.Tensor, *, flat: bool = False) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """The elements as boxes of the slice, as few as there can be: first index in the slice, and a view.

        Args:
            tensor: the parameter, or one that is laid out like it.
            flat: whether the slice counts as a vector.
        """
        values, first = self.of(tensor), 0
        for offsets, sizes in row_major_boxes((self.slice.num_elements,) if flat else self.slice.shape, *self[1:3]):
            count = math.prod(sizes)
            yield offsets, values[first : first + count].view(sizes)
            first += count


class Bucket:
    """One rank's memory for a bucket.

    Args:
        layout: the bucket.
        group: the holders; None if this rank is none of them and only receives weights (backward regime).
        owns_all: whether this rank's optimizer steps all of it, and not only a shard (stage 0).

    Attributes:
        weights: flat [size] in the weights' dtype.
        gradients: flat [size] in the dtype in which gradients are summed; None while there are none.
        weight_slots, gradient_slots: of each slice its view into these, in the slice's shape.
        parameters: what the optimizer steps: the shard, or for an optimizer of whole tensors its tensors.
        places: of each slice its tensor and its index among the slices of that which are held.
        filled: for each slice whether its slot has the sum of this step's gradients so far.
        waits_for: names of tensors whose gradients have not come in this backward pass.
        shard: what the optimizer steps: fp32, flat, may be empty, a view of `weights` where that is possible.
        gradient: the average for `shard`, once it is there.
        host: with CPU offload the memory of `shard` and `gradient`.
    """

    def __init__(self, layout: BucketLayout, group: HolderGroup | None, *, owns_all: bool) -> None:
        self.layout, self.group, self.owns_all = layout, group, owns_all
        self.names = list(dict.fromkeys(part.piece.parameter for part in layout.slices))
        self.places: list[tuple[str, int]] = []
        self.waits_for = set(self.names)
        self.filled = [False] * len(layout.slices)
        self.gradients: torch.Tensor | None = None
        self.gradient_slots: list[torch.Tensor] = []
        self.shard: nn.Parameter | None = None
        self.parameters: list[nn.Parameter] = []
        self.gradient: torch.Tensor | None = None
        self.host: HostShard | None = None

    def place_weights(self, buffer: torch.Tensor) -> None:
        self.weights = buffer[: self.layout.size]
        self.weight_slots = self._slots(buffer)

    def place_gradients(self, buffer: torch.Tensor) -> None:
        self.gradients = buffer[: self.layout.size]
        self.gradient_slots = self._slots(buffer)

    def drop_gradients(self) -> None:
        self.gradients, self.gradient_slots = None, []

    def _slots(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [flat[s.start : s.start + s.num_elements].view(s.shape) for s in self.layout.slices]

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a flat buffer that this rank owns."""
        assert self.group is not None
        first, end = self.layout.shard_range(self.group.position)
        return flat[first:end]

    def stepped_part(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of a flat buffer that this rank's optimizer steps."""
        return flat if self.owns_all else self.shard_of(flat)

    def load_weights(self, view: Callable[[Piece], torch.Tensor]) -> None:
        """Fill `weights` from the module's tensors."""
        self.weights[self.layout.num_elements :].zero_()
        torch._foreach_copy_(self.weight_slots, [view(part.piece) for part in self.layout.slices])

    def make_shard(self, *, offload: bool = False, pin_memory: bool = False) -> None:
        """Create `shard` from `weights`; a copy for cut tensors and low precision, and with offload to host memory."""
        values = self.stepped_part(self.weights)
        dtype = torch.promote_types(values.dtype, torch.float32)
        if offload:
            self.host = HostShard(values, pin_memory=pin_memory)
            self.shard = nn.Parameter(self.host.weights)
        else:
            is_view = self.layout.is_whole and dtype == values.dtype
            self.shard = nn.Parameter(values if is_view else values.to(dtype, copy=True))
        self.parameters = [self.shard]
        if self.layout.owner is not None:
            self.parameters = [nn.Parameter(tensor) for tensor in self._stepped_tensors(self.shard.detach())]

    def set_gradients(self, gradient: torch.Tensor | None) -> None:
        """Give the optimizer the gradient of `shard`; None takes it away."""
        gradients: Sequence[torch.Tensor | None] = [gradient]
        if gradient is None:
            gradients = [None] * len(self.parameters)
        elif self.layout.owner is not None:
            gradients = self._stepped_tensors(gradient)
        for parameter, own in zip(self.parameters, gradients, strict=True):
            parameter.grad = own

    def parts(self, *, owned: bool) -> Iterator[ShardPart]:
        """What this rank's optimizer steps, by slice.

        Args:
            owned: only what this rank owns, so that each element is some rank's once; in stage 0 that is less.
        """
        assert self.group is not None
        position = self.group.position
        ranges = self.layout.owned(position)
        if self.owns_all and not owned:
            ranges = ((part, 0, part.num_elements) for part in self.layout.slices)
        before = 0 if self.owns_all else self.layout.shard_range(position)[0]
        for part, start, stop in ranges:
            if self.layout.owner is not None:
                yield ShardPart(part, start, stop, self.parameters[self.layout.slices.index(part)], start)
            else:
                yield ShardPart(part, start, stop, self.parameters[0], part.start + start - before)

    def _stepped_tensors(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The whole tensors in what this rank steps: all or none."""
        return self._slots(flat) if flat.numel() else []

    @property
    def steps_in_place(self) -> bool:
        """Whether `shard` is a view of `weights`."""
        assert self.shard is not None
        return self.shard.data_ptr() == self.stepped_part(self.weights).data_ptr()

    def refresh_shard(self) -> None:
        """Take into `shard` the elements of `weights` that are not its rounding any more."""
        assert self.shard is not None
        if not self.steps_in_place:
            shard = self.shard.detach()
            values = self.stepped_part(self.weights).to(shard.device)
            shard.copy_(torch.where(shard.to(values.dtype) == values, shard, values.to(shard.dtype)))

    def store_shard(self) -> None:
        """Round `shard` into `weights`."""
        assert self.shard is not None
        if self.host is not None:
            self.host.send_weights(self.stepped_part(self.weights))
        elif not self.steps_in_place:
            self.stepped_part(self.weights).copy_(self.shard.detach())

    def store_weights(self, view: Callable[[Piece], torch.Tensor]) -> None:
        """Copy `weights` into cut tensors; whole ones are views of it."""
        if not self.layout.is_whole:
            torch._foreach_copy_([view(part.piece) for part in self.layout.slices], self.weight_slots)
