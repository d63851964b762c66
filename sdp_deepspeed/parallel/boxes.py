"""Boxes of dense tensors, in which checkpoints, re-planning, exports and `safe_get_full_*` see what a rank stores.

How memory is laid out (flat shards of buckets, FSDP2's parameters, modules' tensors) is behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import add
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from sdp_deepspeed.parallel.buckets import Bucket
from sdp_deepspeed.units import Piece


class Box(NamedTuple):
    """A box of a dense tensor, and where its elements are on this rank.

    Args:
        offsets: first index along each dim of the dense tensor; with tensor parallelism, of this rank's part.
        tensor: what contains the elements: a parameter of the optimizer, a frozen parameter, a buffer, or a view.
        inside: index of the elements in `tensor`, in row-major order.
        is_stepped: whether `tensor` is a parameter of the optimizer.
        is_written: whether this rank saves the box; one rank saves each element.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: torch.Tensor
    inside: tuple[slice, ...] = ()
    is_stepped: bool = False
    is_written: bool = True

    def view(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """View of the elements, in the shape of the box.

        Args:
            tensor: a tensor with the layout of `self.tensor`, such as a moment. Default: `self.tensor`.
        """
        return local_of(self.tensor if tensor is None else tensor)[self.inside].view(self.sizes)

    def of(self, dense: torch.Tensor) -> torch.Tensor:
        """View of the box in the dense tensor."""
        return dense[tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))]


def shard_boxes(bucket: Bucket) -> Iterator[Box]:
    """Yield the boxes that this rank owns of a bucket, and steps."""
    layout, position = bucket.layout, bucket.group.position
    before = layout.shard_range(position)[0]
    for item, start, stop in layout.owned(position):
        piece = item.piece
        origin = piece.offsets(len(item.shape))
        if layout.stepping_position is not None:  # whole tensors
            stepped = bucket.parameters[layout.slices.index(item)]
            yield Box(piece.parameter, origin, item.shape, stepped, is_stepped=True)
            continue
        first = item.start + start - before
        for offsets, sizes in row_major_boxes(item.shape, start, stop):
            last = first + math.prod(sizes)
            inside, offsets = (slice(first, last),), tuple(map(add, origin, offsets))
            stepped = bucket.parameters[0]
            yield Box(piece.parameter, offsets, sizes, stepped, inside, is_stepped=True)
            first = last


def box_of_piece(piece: Piece, values: torch.Tensor, *, is_written: bool) -> Box:
    """The box of a piece, from a view of it."""
    return Box(piece.parameter, piece.offsets(values.dim()), tuple(values.shape), values, is_written=is_written)


def row_major_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield elements [start, stop) in row-major order as a minimal number of boxes (offsets, sizes)."""
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


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, or the tensor itself; detached."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
