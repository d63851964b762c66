"""Routes: what crosses between nodes is the least that can, and both ends of every message agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.exchange.routes import Half, Route, Stretch, carried, owned, routes_back
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.cuts import Location
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import Segment, carriers, receives
from sdp_deepspeed.units import Piece
from tests.helpers.random_layouts import NODES, Layout, placed, random_layout, without_whole

layouts = st.builds(
    placed,
    st.builds(random_layout, st.integers(0, 100_000), st.integers(1, 8), st.sampled_from(["forward", "backward"])),
    st.sampled_from(sorted(NODES)),
)
RECEIVERS: tuple[Receivers, ...] = ("holders", "others", "all")


def routes(layout: Layout, bucket: Bucket, receivers: Receivers) -> tuple[list[Route], list[Route]]:
    """Of all ranks: between nodes, and inside them."""
    pairs = [routes_back(bucket, rank, layout.nodes, receivers) for rank in range(layout.size)]
    return [between for between, _ in pairs], [inside for _, inside in pairs]


@given(layouts, st.sampled_from(RECEIVERS))
def test_both_ends_agree(layout: Layout, receivers: Receivers) -> None:
    for bucket in layout.buckets:
        for collective in routes(layout, bucket, receivers):
            sends = [[route.sent.by_peer[peer] for peer in range(layout.size)] for route in collective]
            arrives = [[route.received.by_peer[peer] for peer in range(layout.size)] for route in collective]
            assert sends == [[arrives[peer][rank] for peer in range(layout.size)] for rank in range(layout.size)]
            needed = {route.is_needed for route in collective}
            assert len(needed) == 1
            assert needed == {True} or not any(stretches for row in sends for stretches in row)


@given(layouts, st.sampled_from(RECEIVERS))
def test_each_collective_stays_on_its_side(layout: Layout, receivers: Receivers) -> None:
    node = layout.nodes.of_rank
    for bucket in layout.buckets:
        for is_inside, collective in enumerate(routes(layout, bucket, receivers)):
            for rank, route in enumerate(collective):
                for peer, stretches in enumerate(route.sent.by_peer):
                    assert not stretches or (rank != peer and (node[rank] == node[peer]) == bool(is_inside))


@given(layouts, st.sampled_from(RECEIVERS))
def test_between_nodes_each_node_gets_an_element_once(layout: Layout, receivers: Receivers) -> None:
    """The bound: n (m - 1) elements for m nodes, of which one has what it owns; in all, however many are inside."""
    for bucket in layout.buckets:
        between, inside = routes(layout, bucket, receivers)
        for index, segment in enumerate(bucket.segments):
            holding = {layout.nodes.of_rank[rank] for rank in segment.holders}
            getting = {"holders": holding, "all": set(layout.nodes.of_rank)}.get(
                receivers, set(layout.nodes.of_rank) - holding
            )
            least = segment.num_elements * (len(getting) - (receivers != "others"))
            assert elements(between, index) == least
            own = segment.num_elements * sum(receives(segment, rank, receivers) for rank in range(layout.size))
            # Inside, everybody gets the rest from its carriers: all but the slices that came from elsewhere or are own.
            assert elements(inside, index) == own - segment.num_elements * len(getting)


def elements(collective: list[Route], segment: int) -> int:
    return sum(s.num_elements for route in collective for s in route.sent.stretches if s.segment == segment)


@given(layouts)
def test_slices_are_one_stretch_with_the_own_shard_in_it(layout: Layout) -> None:
    for bucket in layout.buckets:
        for rank in range(layout.size):
            slices = {stretch.segment: stretch for stretch in carried(bucket, rank, layout.nodes)}
            for shard in owned(bucket, rank):
                whole = slices[shard.segment]
                assert whole.start <= shard.start < shard.stop <= whole.stop
        for segment in bucket.segments:
            for part in carriers(segment, layout.nodes, "holders"):
                ends = [0, *[stop for _, _, stop in part]]
                assert [start for _, start, _ in part] == ends[:-1]
                assert not part or ends[-1] == segment.num_elements


def located(half: Half) -> list[tuple[Stretch, Location]]:
    return list(zip(half.stretches, half.locations, strict=True))


@pytest.mark.parametrize("nodes", ["halves", "1 + 2 + 3"])
def test_what_goes_to_several_ranks_is_read_once(nodes: str) -> None:
    """Not of whole tensors: nodes with other numbers of carriers cut them otherwise."""
    layout = without_whole(placed(random_layout(3, 6, "backward"), nodes))
    for bucket in layout.buckets:
        for rank in range(layout.size):
            for route in routes_back(bucket, rank, layout.nodes, "all"):
                read = sum(fragment.num_elements for fragment in route.sent.transfer.fragments)
                assert read == sum(stretch.num_elements for stretch in set(route.sent.stretches))
                assert read <= sum(segment.num_elements for segment in bucket.segments)
                buffer = torch.full((route.sent.num_elements,), -1)
                numbers = {stretch: number for number, stretch in enumerate(set(route.sent.stretches))}
                firsts = {stretch: start for stretch, (_, start) in reversed(located(route.sent))}
                for stretch, start in firsts.items():
                    buffer[start : start + stretch.num_elements] = numbers[stretch]
                route.sent.repeats.copy([buffer], [buffer])
                for stretch, (_, start) in located(route.sent):
                    assert bool((buffer[start : start + stretch.num_elements] == numbers[stretch]).all())


def test_large_parts_of_a_buffer_are_aligned() -> None:
    """Of 5,000 elements three holders own 1,728, 1,728 and 1,544; messages begin at multiples of 64, with small
    parts of the same bucket too."""
    piece = Piece("w", None, 0, 5000)
    segment = Segment(0, torch.bfloat16, (0, 1, 2), (Fragment(piece, 0, 5000),))
    small = Segment(0, torch.bfloat16, (0, 2), (Fragment(piece, 0, 6),))
    mixed = routes_back(Bucket(0, (small, segment)), 2, Nodes.one(3), "holders")[1]
    assert (mixed.sent.splits, mixed.received.splits) == ([1600, 1600, 0], [1792, 1728, 0])
    assert routes_back(Bucket(0, (small,)), 2, Nodes.one(3), "holders")[1].sent.splits == [3, 0, 0]
    route = routes_back(Bucket(0, (segment, segment)), 2, Nodes.one(3), "holders")[1]
    assert [segment.owned_range(rank) for rank in range(3)] == [(0, 1728), (1728, 3456), (3456, 5000)]
    assert route.sent.splits == [3136, 3136, 0]  # twice 1,544 is 3,088
    assert route.received.splits == [3456, 3456, 0]
    assert [location.start for location in route.sent.locations] == [0, 1544, 3136, 4680]


def test_receivers() -> None:
    segment = random_layout(0, 4).segments[0]
    for rank in range(4):
        held = rank in segment.holders
        assert [receives(segment, rank, receivers) for receivers in RECEIVERS] == [held, not held, True]
