"""Routes: what crosses between nodes is the least that can, and both ends of every message agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.exchange.routes import Route, carried, carriers, owned, receives, routes_back
from sdp_deepspeed.layout.nodes import Receivers
from sdp_deepspeed.layout.segments import Bucket
from tests.helpers.random_layouts import NODES, Layout, placed, random_layout

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


@pytest.mark.parametrize("nodes", ["halves", "1 + 2 + 3"])
def test_what_goes_to_several_ranks_is_read_once(nodes: str) -> None:
    layout = placed(random_layout(3, 6, "backward"), nodes)
    for bucket in layout.buckets:
        for rank in range(layout.size):
            for route in routes_back(bucket, rank, layout.nodes, "all"):
                assert sum(route.sent.sizes) == sum(stretch.num_elements for stretch in route.sent.distinct)
                assert sum(route.sent.sizes) <= sum(segment.num_elements for segment in bucket.segments)


def test_receivers() -> None:
    segment = random_layout(0, 4).segments[0]
    for rank in range(4):
        held = rank in segment.holders
        assert [receives(segment, rank, receivers) for receivers in RECEIVERS] == [held, not held, True]
