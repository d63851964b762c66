"""Nodes: whose shards are neighbors, and what a rank packs at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.layout.nodes import Nodes


@st.composite
def nodes_and_holders(draw: st.DrawFn) -> tuple[Nodes, tuple[int, ...]]:
    nodes = Nodes.of(draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)))
    ranks = draw(st.sets(st.integers(0, len(nodes.of_rank) - 1), min_size=1))
    return nodes, tuple(sorted(ranks))


def test_labels_become_numbers_in_their_order() -> None:
    nodes = Nodes.of(["b", "a", "b", ("c", 1)])
    assert nodes == Nodes((0, 1, 0, 2))
    assert nodes.ranks == ((0, 2), (1,), (3,))
    assert nodes.neighbors(2) == (0, 2)
    assert nodes.per_node((3, 2, 0)) == [[2, 0], [], [3]]
    assert Nodes.one(2).ranks == ((0, 1),)


@given(nodes_and_holders())
def test_shards_keep_the_order_of_each_node(case: tuple[Nodes, tuple[int, ...]]) -> None:
    nodes, holders = case
    order = nodes.shard_order(holders)
    assert tuple(sorted(order)) == holders
    assert all(own == sorted(own) for own in nodes.per_node(order))
    assert Nodes.one(len(nodes.of_rank)).shard_order(holders) == holders


def test_ranks_at_the_same_place_of_their_nodes_are_neighbors() -> None:
    assert Nodes.of("aaabbb").shard_order(range(6)) == (0, 3, 1, 4, 2, 5)
    assert Nodes.of("aab").shard_order(range(3)) == (0, 2, 1)  # the one of b may be anywhere
    assert Nodes.of("aabcdefg").shard_order(range(8)) == (0, 2, 3, 4, 1, 5, 6, 7)


@given(nodes_and_holders())
def test_a_shard_is_in_the_part_of_its_holder(case: tuple[Nodes, tuple[int, ...]]) -> None:
    """Of the holders of its node, as far as places are whole."""
    nodes, holders = case
    order = nodes.shard_order(holders)
    for ranks in nodes.per_node(holders):
        for index, rank in enumerate(ranks):
            begin, end = (place * len(holders) / len(ranks) for place in (index, index + 1))
            assert begin - 1 < order.index(rank) < end + 1
