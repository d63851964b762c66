"""Segments are cut where it is asked, and their shards part them among their holders."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.segments import Segment
from sdp_deepspeed.units import Piece
from tests.helpers.random_layouts import Layout, random_layout

layouts = st.builds(random_layout, st.integers(0, 100_000), st.integers(1, 6), st.sampled_from(["forward", "backward"]))
# A segment of two pieces whose fragments do not start at 0, as after a cut.
TWO = Segment(
    0,
    torch.float32,
    (1, 4, 5),
    (Fragment(Piece("a", None, 0, 10), 3, 10), Fragment(Piece("b", 0, 2, 2), 1, 5)),
)


@given(layouts)
def test_shards_part_a_segment_among_its_holders(layout: Layout) -> None:
    for segment in layout.segments:
        shards = [segment.owned_range(rank) for rank in range(layout.size)]
        covered = [index for start, stop in shards for index in range(start, stop)]
        assert sorted(covered) == list(range(segment.num_elements))
        longest = -(-segment.num_elements // segment.num_shards)
        assert segment.sole_owner is None or segment.sole_owner in segment.holders
        assert all(stop - start <= longest for start, stop in shards)
        assert all(start == stop for rank, (start, stop) in enumerate(shards) if rank not in segment.holders)


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
    assert [TWO.owned_range(rank) for rank in (0, 1, 4, 5)] == [(0, 0), (0, 4), (4, 8), (8, 11)]
    assert list(TWO.cut(4, 8)) == [Fragment(Piece("a", None, 0, 10), 7, 10), Fragment(Piece("b", 0, 2, 2), 1, 2)]
    assert [part.num_elements for part in TWO.split(4)] == [4, 4, 3]
    assert all(part.holders == TWO.holders for part in TWO.split(4))


@given(layouts, st.data())
def test_slices_part_a_segment_and_have_the_shards_of_their_ranks(layout: Layout, data: st.DataObject) -> None:
    segment = data.draw(st.sampled_from(layout.segments))
    ranks = [rank for rank in segment.owners if data.draw(st.booleans())] or [layout.size]  # one that holds nothing
    slices = segment.slices(ranks)
    assert [rank for rank, *_ in slices] == ranks
    assert [start for _, start, _ in slices] == [0, *(stop for *_, stop in slices[:-1])]
    assert slices[-1][2] == segment.num_elements
    for rank, start, stop in slices:
        own_start, own_stop = segment.owned_range(rank)
        assert own_start == own_stop or start <= own_start <= own_stop <= stop


def test_one_rank_may_own_all() -> None:
    """Its neighbors carry nothing of it; elsewhere carriers have even slices."""
    whole = replace(TWO, sole_owner=4)
    assert [whole.owned_range(rank) for rank in (0, 1, 4, 5)] == [(0, 0), (0, 0), (0, 11), (0, 0)]
    assert list(whole.owners_of(2, 7)) == [(4, 2, 7)]
    assert whole.slices((1, 4, 5)) == [(1, 0, 0), (4, 0, 11), (5, 11, 11)]
    assert whole.slices((1, 5)) == [(1, 0, 6), (5, 6, 11)]
    assert all(part.sole_owner == 4 for part in whole.split(4))
