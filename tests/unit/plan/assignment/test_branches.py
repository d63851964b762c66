"""Assignments of heads and groups of neurons: every subnetwork keeps a unit of each branch."""

from __future__ import annotations

import hashlib
import itertools
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.units import UnitCost
from tests.helpers.assignment_tables import (
    ATTENTION,
    MLP,
    MOST_SUBNETWORKS,
    Branches,
    check_even,
    check_table,
    checked,
    costs_of,
    equal_units,
    gap,
    loads,
    model,
    widths,
)
from tests.helpers.properties import examples, large, thorough_only


@st.composite
def branched(draw: st.DrawFn, *, equal: bool = False) -> tuple[list[UnitCost], Branches, int, int]:
    """(costs, branches, k, p): branches just large enough or larger, block units, in any order."""
    k = draw(st.integers(1, MOST_SUBNETWORKS))
    p = draw(st.integers(1, k))
    fewest = -(-k // p)
    sizes = draw(st.lists(st.integers(fewest, fewest + 4), min_size=1, max_size=3))
    branches: Branches = [f"branch {i}" for i, size in enumerate(sizes) for _ in range(size)]
    branches = draw(st.permutations(branches + [None] * draw(st.integers(0, 4))))
    if equal:
        return equal_units(len(branches)), branches, k, p
    return draw(costs_of(len(branches), 4)), branches, k, p


@examples(30)
@given(branched(), st.integers(0, 3))
def test_balanced_keeps_a_unit_of_each_branch(problem: tuple[list[UnitCost], Branches, int, int], seed: int) -> None:
    costs, branches, k, p = problem
    checked(
        partial(assignment.balanced, costs, num_subnetworks=k, num_holders=p, seed=seed, branches=branches),
        branches,
        k,
        p,
    )


@examples(40)
@given(branched())
def test_cyclic_keeps_widths_even(problem: tuple[list[UnitCost], Branches, int, int]) -> None:
    costs, branches, k, p = problem
    holders = assignment.cyclic(len(costs), num_subnetworks=k, num_holders=p, branches=branches)
    check_table(holders, len(costs), k, p)
    check_even(holders, branches, k, p)


@examples(30)
@given(branched(equal=True))
def test_units_of_equal_cost_are_dealt_out_evenly(problem: tuple[list[UnitCost], Branches, int, int]) -> None:
    """Each branch and all together: what a branch leaves over goes to who has the least."""
    costs, branches, k, p = problem
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, branches=branches)
    check_even(holders, branches, k, p)
    held = loads(holders, [1] * len(costs), k)
    assert max(held) - min(held) <= 1


@pytest.mark.parametrize(
    ("layers", "heads", "groups", "k", "p"),
    [(1, 3, 3, 3, 1), (1, 3, 6, 3, 2), (2, 1, 4, 4, 4), (4, 2, 4, 4, 2), (3, 4, 8, 4, 1), (2, 5, 10, 5, 3)],
    ids=["p = 1, one unit each", "k = 3", "one head, p = k", "m p = k", "p = 1", "odd"],
)
def test_layers_that_divide_evenly(layers: int, heads: int, groups: int, k: int, p: int) -> None:
    costs, branches = model(layers, heads, groups)
    for holders in (
        assignment.balanced(costs, num_subnetworks=k, num_holders=p, branches=branches),
        assignment.cyclic(len(costs), num_subnetworks=k, num_holders=p, branches=branches),
    ):
        check_table(holders, len(costs), k, p)
        for name, found in widths(holders, branches, k).items():
            assert found == [(heads if name.endswith("attention") else groups) * p // k] * k
        assert len(set(loads(holders, [cost.flops for cost in costs], k))) == 1


def test_what_is_left_over_goes_round() -> None:
    """Three heads for two subnetworks: one has the wider attention in the one layer, the other in the next."""
    costs, branches = model(2, 3, 2)
    for holders in (
        assignment.balanced(costs, num_subnetworks=2, num_holders=1, branches=branches),
        assignment.cyclic(len(costs), num_subnetworks=2, num_holders=1, branches=branches),
    ):
        check_even(holders, branches, 2, 1)
        assert len(set(loads(holders, [cost.flops for cost in costs], 2))) == 1


def test_windows_are_turned_to_where_most_room_is() -> None:
    branches = ["a"] * 5 + ["b"] * 7
    holders = assignment.cyclic(12, num_subnetworks=4, num_holders=1, branches=branches)
    assert loads(holders, [1] * 12, 4) == [3] * 4


def test_windows_that_do_not_meet_are_connected() -> None:
    """Two windows of five cover ten subnetworks; the block's window lies within one of them."""
    branches: Branches = ["a", "a", None]
    holders = assignment.cyclic(3, num_subnetworks=10, num_holders=5, branches=branches)
    check_table(holders, 3, 10, 5)
    check_even(holders, branches, 10, 5)


def test_flops_come_before_even_widths() -> None:
    """Even widths would give 10 and more to one and 2 or 3 to the other."""
    costs = [UnitCost(1, 1, flops) for flops in (10, 1, 1, 1, 1)]
    holders = assignment.balanced(costs, num_subnetworks=2, num_holders=1, branches=["mlp"] * 5)
    assert sorted(loads(holders, [cost.flops for cost in costs], 2)) == [4, 10]


def test_flops_of_blocks_are_made_up_for_by_widths() -> None:
    """Two blocks of 4 for four subnetworks: who has none gets 6 of the 16 units of 1, the others one of each branch."""
    costs = [UnitCost(4, 4, 4)] * 2 + [UnitCost(1, 1, 1)] * 16
    branches: Branches = [None, None, *["layers.0.mlp"] * 8, *["layers.1.mlp"] * 8]
    holders = assignment.balanced(costs, num_subnetworks=4, num_holders=1, branches=branches)
    assert loads(holders, [cost.flops for cost in costs], 4) == [6] * 4
    assert all(min(found) >= 1 for found in widths(holders, branches, 4).values())


# (k, p, FLOPs of each branch's units and of the blocks); ends at even widths and FLOPs only if one part works.
EVEN_AND_BALANCED = {
    "trading within a branch": (3, 1, [[6, 18, 7], [9, 11, 20], [17, 9, 12, 11]], []),
    "restarts are compared by widths": (2, 1, [[8, 8, 29, 29, 8]], [29]),
    "groups that differ by a step": (4, 3, [[13, 13, 13, 12, 12, 12, 12, 12]] * 3, []),
}


@pytest.mark.parametrize(("k", "p", "flops", "blocks"), EVEN_AND_BALANCED.values(), ids=list(EVEN_AND_BALANCED))
def test_widths_stay_even_where_flops_allow_it(k: int, p: int, flops: list[list[int]], blocks: list[int]) -> None:
    costs = [UnitCost(1, 1, amount) for amount in [*itertools.chain(*flops), *blocks]]
    branches: Branches = [f"branch {i}" for i, amounts in enumerate(flops) for _ in amounts]
    branches += [None] * len(blocks)
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, branches=branches)
    check_even(holders, branches, k, p)
    held = loads(holders, [cost.flops for cost in costs], k)
    assert max(held) * k <= 1.05 * sum(held)


def test_units_of_different_branches_trade_places() -> None:
    costs = [UnitCost(1, 1, flops) for flops in (15, 17, 19, 12, 11, 19, 12)]
    branches: Branches = ["a", "a", "a", "b", "b", "b", None]
    holders = assignment.balanced(costs, num_subnetworks=6, num_holders=4, branches=branches)
    assert all(min(found) >= 1 for found in widths(holders, branches, 6).values())
    held = loads(holders, [cost.flops for cost in costs], 6)
    assert max(held) * 6 <= 1.05 * sum(held)


@examples(20)
@given(branched())
def test_seed_breaks_ties_only(problem: tuple[list[UnitCost], Branches, int, int]) -> None:
    costs, branches, k, p = problem
    tables = [
        assignment.balanced(costs, num_subnetworks=k, num_holders=p, seed=seed, branches=branches) for seed in (0, 7)
    ]
    per_branch = [{name: sorted(found) for name, found in widths(table, branches, k).items()} for table in tables]
    assert per_branch[0] == per_branch[1]
    flops = [sorted(loads(table, [cost.flops for cost in costs], k)) for table in tables]
    assert flops[0] == flops[1]
    assert gap(tables[0], costs, k) == pytest.approx(gap(tables[1], costs, k), abs=1e-9)


def test_seed_has_an_effect() -> None:
    costs, branches = model(2, 4, 4)
    tables = {
        assignment.balanced(costs, num_subnetworks=4, num_holders=2, seed=seed, branches=branches) for seed in range(3)
    }
    assert len(tables) == 3


def digest(holders: assignment.Holders) -> str:
    return hashlib.sha256(repr(holders).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("costs", "seed", "expected"),
    [
        ([ATTENTION, MLP] * 8, 0, "de9bd640d098039f"),
        large([ATTENTION, MLP] * 8, 3, "ed05f5f860017542"),
        large([UnitCost(i * i % 17, i * 5 % 23, i * 7 % 31) for i in range(1, 18)], 0, "06469b876da3806c"),
    ],
    ids=["layers", "layers, another seed", "uneven"],
)
def test_plans_of_blocks_stay_as_they_were(costs: list[UnitCost], seed: int, expected: str) -> None:
    """Digests of the first release: runs that resume make their plan again."""
    for branches in (None, [None] * len(costs)):
        holders = assignment.balanced(costs, num_subnetworks=8, num_holders=4, seed=seed, branches=branches)
        assert digest(holders) == expected


def test_known_plan_stays() -> None:
    """Platforms and releases must agree on the plan, or ranks with different versions would not start together."""
    costs, branches = model(1, 2, 4)
    known = assignment.balanced(costs, num_subnetworks=4, num_holders=2, branches=branches)
    assert known == ((1, 2), (0, 3), (2, 3), (0, 1), (0, 2), (1, 3))
    windows = assignment.cyclic(6, num_subnetworks=4, num_holders=2, branches=branches)
    assert windows == ((0, 1), (2, 3), (0, 1), (1, 2), (2, 3), (0, 3))


@thorough_only()
def test_known_plan_of_branches_and_blocks_stays() -> None:
    costs, branches = model(4, 3, 8)
    costs, branches = [*costs, ATTENTION, MLP], [*branches, None, None]
    holders = assignment.balanced(costs, num_subnetworks=8, num_holders=3, seed=1, branches=branches)
    assert digest(holders) == "e6143b031508f169"


@pytest.mark.parametrize(
    ("layers", "heads", "groups", "k", "p", "expected"),
    [
        large(24, 8, 8, 8, 4, 0.85),
        large(12, 12, 16, 16, 4, 0.79),
        (1, 8, 8, 8, 4, 0.78),
        large(24, 8, 64, 64, 8, 0.85),
    ],
)
def test_spectral_gap_is_that_of_free_units(
    layers: int, heads: int, groups: int, k: int, p: int, expected: float
) -> None:
    """Without branches, and with as many sets as units, a search ends at 0.857, 0.797, 0.805 and 0.885; the time limit
    is loose."""
    costs, branches = model(layers, heads, groups)
    start = time.monotonic()
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, branches=branches)
    assert time.monotonic() - start < 60
    assert gap(holders, costs, k) > expected
    check_even(holders, branches, k, p)


def test_too_few_units_of_a_branch() -> None:
    _, branches = model(2, 2, 8)
    for assign in (
        lambda: assignment.balanced(equal_units(20), num_subnetworks=8, num_holders=3, branches=branches),
        lambda: assignment.cyclic(20, num_subnetworks=8, num_holders=3, branches=branches),
    ):
        with pytest.raises(ValueError, match="of that branch") as caught:
            assign()
        text = str(caught.value)
        assert "branch 'layers.0.attention', +1 more: 2 units with 3 holders each cannot give each of 8" in text
        assert "use 4 or more holders, for an MLP more neuron_groups" in text
        assert '{"attention": "block", "mlp": "neuron"}, or fewer subnetworks' in text


def test_advice_serves_all_branches() -> None:
    """The first of two branches is short of one holder, the second of more."""
    branches = ["a"] * 3 + ["b"] * 2
    with pytest.raises(ValueError, match=r"branch 'a', \+1 more: 3 units with 1 holders .* use 3 or more holders"):
        assignment.balanced(equal_units(5), num_subnetworks=6, num_holders=1, branches=branches)
    assignment.balanced(equal_units(5), num_subnetworks=6, num_holders=3, branches=branches)


def test_one_entry_for_each_unit() -> None:
    with pytest.raises(ValueError, match="for each of 3 units; got 2"):
        assignment.cyclic(3, num_subnetworks=2, num_holders=1, branches=["a", "a"])
