"""Holders on few nodes: fewer than a balanced table's, for not too much of its spectral gap."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import gcd

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sdp_deepspeed.plan.assignment.graph import Holders
from sdp_deepspeed.plan.assignment.methods import balanced
from sdp_deepspeed.plan.assignment.nodes import find_rings, on_few_nodes
from sdp_deepspeed.units import UnitCost
from tests.helpers.assignment_tables import (
    ATTENTION,
    MLP,
    Branches,
    check_even,
    check_table,
    costs_of,
    equal_units,
    gap,
    loads,
    model,
    widths,
)
from tests.helpers.properties import examples, large

BLOCKS = [ATTENTION, MLP] * 8
EIGHT_OF_EIGHT = [rank // 8 for rank in range(64)]
TWO_OF_FOUR = [0] * 4 + [1] * 4


def visits(holders: Holders, costs: Sequence[UnitCost], nodes: Sequence[int]) -> int:
    """Elements that leave a node, each way."""
    on = [len({nodes[subnetwork] for subnetwork in subnetworks}) for subnetworks in holders]
    return sum(cost.num_parameters * (count - 1) for cost, count in zip(costs, on, strict=True))


def both(
    costs: Sequence[UnitCost], nodes: Sequence[int], p: int, branches: Branches | None = None, seed: int = 0
) -> tuple[Holders, Holders | None]:
    """The balanced table, and the one on few nodes."""
    before = balanced(costs, num_subnetworks=len(nodes), num_holders=p, seed=seed, branches=branches)
    return before, on_few_nodes(costs, before, nodes, seed=seed, branches=branches)


@st.composite
def over_nodes(draw: st.DrawFn) -> tuple[list[UnitCost], Branches, list[int], int]:
    """(costs, branches, nodes, p): nodes of any sizes, in any order."""
    k = draw(st.integers(4, 8))
    p = draw(st.integers(2, k - 2))
    nodes = draw(st.lists(st.integers(0, 3), min_size=k, max_size=k))
    sizes = draw(st.lists(st.integers(-(-k // p), 2 * k), max_size=2))
    branches: Branches = [f"branch {i}" for i, size in enumerate(sizes) for _ in range(size)]
    branches += [None] * draw(st.integers(0 if sizes else k, k))
    return draw(costs_of(len(branches), 3)), branches, nodes, p


@examples(20)
@given(over_nodes(), st.integers(0, 2))
@example(([UnitCost(1, 0, 0)] * 5, [None] * 5, [0, 0, 1, 1, 2], 3), 2)  # as many, but for rounding
def test_fewer_nodes_and_nothing_else_lost(problem: tuple[list[UnitCost], Branches, list[int], int], seed: int) -> None:
    costs, branches, nodes, p = problem
    k = len(nodes)
    before, found = both(costs, nodes, p, branches, seed)
    if found is None:
        return
    check_table(found, len(costs), k, p)
    assert visits(found, costs, nodes) < visits(before, costs, nodes)
    assert gap(found, costs, k) >= 0.75 * gap(before, costs, k) - 1e-5 > 0
    assert len(set(found)) <= 5 * k
    for amounts in ([cost.flops for cost in costs], [cost.num_bytes for cost in costs]):
        limit = max(1.05 * sum(loads(before, amounts, k)) / k, max(loads(before, amounts, k)))
        assert max(loads(found, amounts, k)) <= limit
    assert all(min(found) >= 1 for found in widths(found, branches, k).values())
    assert found == both(costs, nodes, p, branches, seed)[1]


# (costs, branches), nodes, p: the spectral gap, and the share of what the balanced table sends. README.md has them.
CASES = [
    (model(32, 32, 8), TWO_OF_FOUR, 4, 0.670, 0.75),
    ((BLOCKS + BLOCKS[:8], None), [0, 0, 0, 1, 1, 2], 3, 0.586, 0.80),
    (model(32, 32, 16), [rank // 4 for rank in range(16)], 4, 0.615, 0.70),
    large((BLOCKS * 4, None), [rank // 8 for rank in range(32)], 16, 0.745, 0.50),
    large((BLOCKS * 4, None), EIGHT_OF_EIGHT, 32, 0.835, 0.43),
    large((BLOCKS * 4, None), EIGHT_OF_EIGHT, 16, 0.805, 0.48),
    large((BLOCKS * 4, None), EIGHT_OF_EIGHT, 4, 0.262, 0.41),
    large(model(32, 32, 64), EIGHT_OF_EIGHT, 32, 0.844, 0.43),
    large(model(32, 32, 256), [rank // 8 for rank in range(256)], 128, 0.921, 0.49),
]


@pytest.mark.parametrize(("case", "nodes", "p", "expected", "share"), CASES)
def test_what_is_saved(
    case: tuple[list[UnitCost], Branches | None], nodes: list[int], p: int, expected: float, share: float
) -> None:
    costs, branches = case
    before, found = both(costs, nodes, p, branches)
    assert found is not None
    assert visits(found, costs, nodes) / visits(before, costs, nodes) == pytest.approx(share, abs=0.006)
    assert gap(found, costs, len(nodes)) == pytest.approx(expected, abs=0.001)
    assert expected >= 0.75 * gap(before, costs, len(nodes))
    if branches is not None:
        check_even(found, branches, len(nodes), p)


def test_holders_fill_nodes_where_the_gap_allows_it() -> None:
    """Eight of 16 on eight nodes of two: four whole nodes for every unit, as eight packed subnetworks would have, with
    a gap of 8 * 3 / (4 * 7) = 0.857 at most. With 16 subnetworks it is 16 * 7 / (8 * 15) = 0.933."""
    nodes = [rank // 2 for rank in range(16)]
    _, found = both(equal_units(70), nodes, 8)
    assert found is not None
    assert {len({subnetwork // 2 for subnetwork in holders}) for holders in found} == {4}


@pytest.mark.parametrize(
    ("nodes", "p"),
    [([0] * 8, 4), (list(range(8)), 4), (TWO_OF_FOUR, 1), (TWO_OF_FOUR, 7), (TWO_OF_FOUR, 8), ([0, 1], 1), ([0], 1)],
    ids=["one node", "one subnetwork each", "one holder", "all but one", "all", "two", "one"],
)
def test_nothing_to_gain(nodes: list[int], p: int) -> None:
    assert both(BLOCKS, nodes, p)[1] is None


def test_units_that_differ_stay_balanced() -> None:
    """With more of them on few nodes, where the gap would allow it, FLOPs would be 16% above their mean."""
    costs = [UnitCost(10, 20, flops) for _ in range(6) for flops in (300, 100, 30, 10, 3, 1)]
    _, found = both(costs, TWO_OF_FOUR, 4, [f"branch {unit // 6}" for unit in range(36)])
    assert found is not None
    held = loads(found, [cost.flops for cost in costs], 8)
    assert max(held) * 8 <= 1.05 * sum(held)


@pytest.mark.parametrize(("sizes", "p"), [((4, 5), 3), ((6, 5), 3)])
def test_branches_stay_as_even(sizes: tuple[int, int], p: int) -> None:
    """With more of them on few nodes some subnetworks would have narrower branches than others, at equal FLOPs."""
    branches: Branches = [f"branch {number}" for number, size in enumerate(sizes) for _ in range(size)]
    before, found = both(equal_units(len(branches)), [0, 0, 0, 1, 1, 1], p, branches)
    tables = (before, found or before)
    spreads = [sum(max(width) - min(width) for width in widths(table, branches, 6).values()) for table in tables]
    assert spreads[1] <= spreads[0]


def test_what_is_not_trained_is_not_sent() -> None:
    assert both([UnitCost(0, 20, 30)] * 16, TWO_OF_FOUR, 4)[1] is None
    assert both([UnitCost(0, 20, 30)] * 16 + [UnitCost(1, 20, 30)], TWO_OF_FOUR, 4)[1] is None  # not all hold that one


def test_seed_renames_subnetworks_of_one_node() -> None:
    found = [both(BLOCKS, TWO_OF_FOUR, 4, seed=seed)[1] for seed in range(3)]
    assert None not in found
    tables = [table for table in found if table is not None]
    assert len(set(tables)) == 3
    assert len({visits(table, BLOCKS, TWO_OF_FOUR) for table in tables}) == 1
    assert [gap(table, BLOCKS, 8) for table in tables] == pytest.approx([gap(tables[0], BLOCKS, 8)] * 3)


def test_names_of_nodes_do_not_matter() -> None:
    assert both(BLOCKS, TWO_OF_FOUR, 4)[1] == both(BLOCKS, [3] * 4 + [7] * 4, 4)[1]


def test_known_table_stays() -> None:
    """Platforms and releases must agree on it, or ranks with different versions would not start together."""
    found = both(BLOCKS, TWO_OF_FOUR, 4)[1]
    assert hashlib.sha256(repr(found).encode()).hexdigest()[:16] == "6c57919347f92b35"


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("nodes", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 2, 1, 0], [0, 0, 0, 1, 1, 2, 2]])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_round_of_a_ring_holds_all_equally_often(nodes: list[int], p: int, chunk: int) -> None:
    rounds = find_rings(nodes, p, chunk)
    k = len(nodes)
    assert rounds.shape[1:] == (k // gcd(k, p), k)
    assert rounds.shape[0] * rounds.shape[1] <= k
    assert (rounds.sum(axis=2) == p).all()
    assert (rounds.sum(axis=1) == p // gcd(k, p)).all()


@pytest.mark.parametrize(
    ("p", "chunk", "expected"), [(32, 8, 4), (8, 8, 1), (8, 4, 2), (8, 2, 4), (8, 1, 8), (12, 8, 2)]
)
def test_windows_are_on_few_nodes(p: int, chunk: int, expected: int) -> None:
    sets = find_rings(EIGHT_OF_EIGHT, p, chunk).reshape(-1, 64)
    assert (sets.reshape(-1, 8, 8).any(axis=2).sum(axis=1) == expected).all()
