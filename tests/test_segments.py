"""The flat layout: every element travels exactly once, among exactly its holders, in bounded buckets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import Layout, random_layout

from sdp_deepspeed.plan import Plan
from sdp_deepspeed.segments import (
    NOT_OPTIMIZED,
    Fragment,
    Segment,
    TensorInfo,
    build_buckets,
    build_segments,
    pieces_by_tensor,
)
from sdp_deepspeed.units import Piece, Unit

layouts = st.builds(random_layout, st.integers(0, 100_000), st.integers(1, 6))
# A segment of two pieces whose fragments do not start at 0, as after a cut.
TWO = Segment(
    0,
    torch.float32,
    (1, 4, 5),
    (Fragment(Piece("a", None, 0, 10), 3, 10), Fragment(Piece("b", 0, 2, 2), 1, 5)),
)


def fill(counts: dict[str, torch.Tensor], fragment: Fragment, value: float) -> None:
    view = fragment.piece.narrow(counts[fragment.piece.parameter])
    flat = view.reshape(-1).clone()
    flat[fragment.start : fragment.stop] += value
    view.copy_(flat.view(view.shape))


def zeros(layout: Layout) -> dict[str, torch.Tensor]:
    return {info.name: torch.zeros(info.shape) for info in layout.tensors}


@given(layouts)
def test_every_element_is_in_one_segment(layout: Layout) -> None:
    counts = zeros(layout)
    for segment in layout.segments:
        assert 0 < segment.num_elements <= layout.max_elements
        for fragment in segment.fragments:
            fill(counts, fragment, 1)
    assert all(bool((count == 1).all()) for count in counts.values())


@given(layouts)
def test_segments_have_the_holders_group_and_dtype_of_their_elements(layout: Layout) -> None:
    holders = {info.name: torch.full(info.shape, float(2**layout.size - 1)) for info in layout.tensors}
    for index, unit in enumerate(layout.plan.units):
        for piece in unit.pieces:
            piece.narrow(holders[piece.parameter]).fill_(sum(2**rank for rank in layout.plan.ranks_of(index)))
    found = zeros(layout)
    infos = {info.name: info for info in layout.tensors}
    for segment in layout.segments:
        for fragment in segment.fragments:
            info = infos[fragment.piece.parameter]
            assert (info.group, info.dtype) == (segment.group, segment.dtype)
            fill(found, fragment, sum(2**rank for rank in segment.holders))
    assert all(torch.equal(found[name], holders[name]) for name in found)


@given(layouts)
def test_shards_part_a_segment_among_its_holders(layout: Layout) -> None:
    for segment in layout.segments:
        shards = [segment.shard(rank) for rank in range(layout.size)]
        covered = [index for start, stop in shards for index in range(start, stop)]
        assert sorted(covered) == list(range(segment.num_elements))
        longest = -(-segment.num_elements // len(segment.holders))
        assert all(stop - start <= longest for start, stop in shards)
        assert all(start == stop for rank, (start, stop) in enumerate(shards) if rank not in segment.holders)


@given(layouts)
def test_buckets_keep_the_order_and_the_bound(layout: Layout) -> None:
    buckets = layout.buckets
    assert [segment for bucket in buckets for segment in bucket.segments] == layout.segments
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert len({segment.dtype for segment in bucket.segments}) == 1
        for rank in range(layout.size):
            held = sum(segment.num_elements for segment in bucket.segments if segment.held_by(rank))
            assert held <= layout.max_elements


@given(layouts, st.data())
def test_cut_gives_the_asked_elements(layout: Layout, data: st.DataObject) -> None:
    segment = data.draw(st.sampled_from(layout.segments))
    start = data.draw(st.integers(0, segment.num_elements))
    stop = data.draw(st.integers(start, segment.num_elements))
    assert elements(list(segment.cut(start, stop))) == elements(list(segment.fragments))[start:stop]


def elements(fragments: list[Fragment]) -> list[tuple[Piece, int]]:
    return [(fragment.piece, index) for fragment in fragments for index in range(fragment.start, fragment.stop)]


def test_cut_and_shards_of_fragments_that_start_late() -> None:
    assert TWO.num_elements == 11
    assert [TWO.shard(rank) for rank in (0, 1, 4, 5)] == [(0, 0), (0, 4), (4, 8), (8, 11)]
    assert list(TWO.cut(4, 8)) == [Fragment(Piece("a", None, 0, 10), 7, 10), Fragment(Piece("b", 0, 2, 2), 1, 2)]
    assert [part.num_elements for part in TWO.split(4)] == [4, 4, 3]
    assert all(part.holders == TWO.holders for part in TWO.split(4))


def test_backward_order_and_one_segment_per_holder_set() -> None:
    """Units of equal holders travel together, last tensors first; what is in no unit goes to everyone."""
    tensors = [TensorInfo(name, (4,), torch.float32, 0) for name in ("in", "a", "b", "c", "out")]
    units = tuple(Unit(name, (Piece(name, None, 0, 4),)) for name in ("a", "b", "c"))
    plan = Plan("forward", "block", 3, 2, 0, units, ((0, 1), (1, 2), (0, 1)), (0, 1, 2))
    segments = build_segments(tensors, plan, max_elements=100)
    names = [[fragment.piece.parameter for fragment in segment.fragments] for segment in segments]
    assert names == [["out", "in"], ["c", "a"], ["b"]]
    assert [segment.holders for segment in segments] == [(0, 1, 2), (0, 1), (1, 2)]
    assert len(build_buckets(segments, size=3, max_elements=100)) == 1


def test_buckets_count_the_fullest_rank_not_the_sum() -> None:
    """Segments of disjoint holders fit one bucket, since no rank packs both."""
    piece = Piece("a", None, 0, 8)
    apart = [Segment(0, torch.float32, holders, (Fragment(piece, 0, 8),)) for holders in ((0, 1), (2, 3), (1, 2))]
    assert [len(bucket.segments) for bucket in build_buckets(apart, size=4, max_elements=8)] == [2, 1]


def test_replicas_hold_what_their_subnetwork_holds() -> None:
    units = tuple(Unit(name, (Piece(name, None, 0, 4),)) for name in ("a", "b"))
    plan = Plan("forward", "block", 2, 1, 0, units, ((1,), (0,)), (0, 1, 0, 1))
    info = TensorInfo("a", (4,), torch.float32, NOT_OPTIMIZED)
    assert pieces_by_tensor([info], plan)["parameter", "a"] == [(Piece("a", None, 0, 4), (1, 3))]


def test_the_rest_of_a_sliced_tensor_is_shared() -> None:
    units = (Unit("u", (Piece("w", 1, 2, 3),)), Unit("v", (Piece("w", 1, 7, 1),)))
    plan = Plan("forward", "block", 2, 1, 0, units, ((0,), (1,)), (0, 1))
    pieces = pieces_by_tensor([TensorInfo("w", (2, 9), torch.float32, 0)], plan)["parameter", "w"]
    assert pieces == [
        (Piece("w", 1, 0, 2), (0, 1)),
        (Piece("w", 1, 2, 3), (0,)),
        (Piece("w", 1, 5, 2), (0, 1)),
        (Piece("w", 1, 7, 1), (1,)),
        (Piece("w", 1, 8, 1), (0, 1)),
    ]
