"""Nodes: whose shards are neighbors, and what a rank packs at most."""

from __future__ import annotations

import itertools

import pytest
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
    assert Nodes.of("aab").shard_order(range(3)) == (0, 2, 1)  # the one of b is in the middle, as its slice is


@pytest.mark.parametrize(
    ("labels", "holders", "expected"),
    [
        ("aaaa", (0, 1), {"holders": 1, "others": 1, "all": 1.5}),
        ("aaaa", (3,), {"holders": 1, "others": 3, "all": 3}),
        ("aabb", (0,), {"holders": 1, "others": 1, "all": 1}),
        ("abcd", (0,), {"holders": 1, "others": 3, "all": 3}),
        ("abcdd", (0, 4), {"holders": 1, "others": 1, "all": 1.5}),
        ("aaaabbbb", (0, 1, 4), {"holders": 1, "others": 3, "all": 3}),  # rank 4 passes on all to three neighbors
    ],
)
def test_copies_by_hand(labels: str, holders: tuple[int, ...], expected: dict[str, float]) -> None:
    nodes = Nodes.of(labels)
    assert {receivers: nodes.copies(holders, receivers) for receivers in ("holders", "others", "all")} == expected


@given(nodes_and_holders())
def test_holders_never_pack_more_than_they_hold(case: tuple[Nodes, tuple[int, ...]]) -> None:
    nodes, holders = case
    assert nodes.copies(holders, "holders") == 1
    found = [nodes.copies(holders, receivers) for receivers in ("holders", "others", "all")]
    assert all(one <= other for one, other in itertools.pairwise(found[::2]))
