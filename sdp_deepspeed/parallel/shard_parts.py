"""What a rank owns of a tensor, as ranges and boxes: for checkpoints and access to single tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from sdp_deepspeed.parallel.buckets import Bucket, Slice
from sdp_deepspeed.units import Piece


class ShardPart(NamedTuple):
    """Elements `start` to `stop` of a slice, in a parameter of the optimizer.

    Args:
        parameter: the parameter that the optimizer steps.
        first: index of the first element in the flattened parameter.
    """

    slice: Slice
    start: int
    stop: int
    parameter: nn.Parameter
    first: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Flat view of the elements in the parameter, or in a tensor with the same layout."""
        return tensor.detach().view(-1)[self.first : self.first + self.stop - self.start]

    @property
    def piece(self) -> Piece:
        return self.slice.piece

    def boxes(self, tensor: torch.Tensor, *, flat: bool = False) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the elements as a minimal number of boxes: offsets in the slice, and a view.

        Args:
            tensor: the parameter, or one with the same layout.
            flat: whether to treat the slice as a vector.
        """
        values, first = self.of(tensor), 0
        for offsets, sizes in row_major_boxes((self.slice.num_elements,) if flat else self.slice.shape, *self[1:3]):
            count = math.prod(sizes)
            yield offsets, values[first : first + count].view(sizes)
            first += count


def shard_parts(bucket: Bucket) -> Iterator[ShardPart]:
    """Yield the parts of slices that this rank owns, and steps."""
    layout, position = bucket.layout, bucket.holder_group.position
    before = layout.shard_range(position)[0]
    for piece, start, stop in layout.owned(position):
        if layout.owner is not None:
            yield ShardPart(piece, start, stop, bucket.parameters[layout.slices.index(piece)], start)
        else:
            yield ShardPart(piece, start, stop, bucket.parameters[0], piece.start + start - before)


def row_major_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield elements [start, stop) in row-major order as boxes (offsets, sizes)."""
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
