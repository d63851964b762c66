"""Boxes of dense tensors: what two have in common, and the rest."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.state.boxes import Box, box_of, in_dense
from sdp_deepspeed.plan.shards import Division, Shards
from sdp_deepspeed.units import Piece


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes = []
    for _ in range(2):
        offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
        sizes = (draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True))
        boxes.append(Box(offsets, tuple(sizes)))
    return shape, boxes[0], boxes[1]


@given(two_boxes())
def test_what_two_boxes_have_in_common_and_the_rest(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, one, other = case
    times, common = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.bool)
    common[one.slices_in(Box.whole(shape))] = True
    expected = torch.zeros(shape, dtype=torch.bool)
    expected[other.slices_in(Box.whole(shape))] = True
    expected &= common
    overlap = one.overlap(other)
    assert overlap == other.overlap(one)
    found = [overlap] if overlap is not None else []
    assert sum(box.num_elements for box in found) == int(expected.sum())
    rest = list(one.without(overlap)) if overlap is not None else [one]
    for box in found + rest:
        times[box.slices_in(Box.whole(shape))] += 1
    assert torch.equal(times == 1, common), "disjoint, and all of the first"
    assert not any(bool(expected[box.slices_in(Box.whole(shape))].any()) for box in rest)


def test_a_tensor_parallel_rank_s_box_in_the_dense_model() -> None:
    shards = Shards(1, 2, {"w": Division((7, 4), 0, (4, 3)), "u": Division((10,), 0, (6, 4), is_known=False)})
    piece = Piece("w", 1, 2, 2)
    assert in_dense(box_of(piece, (3, 4)), piece, shards) == Box((4, 2), (3, 2))
    unknown = Piece("u", None, 0, 4)
    assert in_dense(Box((1,), (2,)), unknown, shards) == Box((7,), (2,))
    assert in_dense(Box((1,), (2,)), Piece("u", None, 0, 4, "buffer"), shards) == Box((1,), (2,))
