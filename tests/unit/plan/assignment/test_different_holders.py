"""Units with different numbers of holders: the goals of a balanced table hold for all of them together."""

from __future__ import annotations

import random
from itertools import combinations, permutations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.plan.assignment.graph import Holders, incidence, is_connected
from sdp_deepspeed.plan.assignment.nodes import on_few_nodes
from sdp_deepspeed.plan.assignment.problem import Ints, Problem
from sdp_deepspeed.plan.assignment.search import search
from sdp_deepspeed.plan.spectral_gap import spectral_gap
from sdp_deepspeed.units import UnitCost
from tests.helpers.assignment_tables import (
    ATTENTION,
    MLP,
    MOST_SUBNETWORKS,
    Branches,
    costs_of,
    equal_units,
    loads,
    model,
    widths,
)
from tests.helpers.properties import examples


def check(holders: Holders, numbers: list[int], k: int) -> None:
    assert [len(subnetworks) for subnetworks in holders] == numbers
    assert all(list(subnetworks) == sorted(set(subnetworks)) for subnetworks in holders)
    assert {s for subnetworks in holders for s in subnetworks} == set(range(k))
    if sum(numbers) - len(numbers) >= k - 1:
        assert is_connected(incidence(holders, k))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[UnitCost], list[int], int, int]:
    """Costs, p of each unit, k and a seed."""
    k = draw(st.integers(1, MOST_SUBNETWORKS))
    numbers = draw(st.lists(st.integers(1, k), min_size=1, max_size=20).filter(lambda found: sum(found) >= k))
    return draw(costs_of(len(numbers), 3)), numbers, k, draw(st.integers(0, 3))


@examples(50)
@given(problems())
def test_any_numbers_make_a_table(problem: tuple[list[UnitCost], list[int], int, int]) -> None:
    costs, numbers, k, seed = problem
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=numbers, seed=seed)
    check(holders, numbers, k)
    assert holders == assignment.balanced(costs, num_subnetworks=k, num_holders=numbers, seed=seed)


@pytest.mark.parametrize("branches", [None, ["mlp"] * 96])
def test_equal_units_keep_their_numbers_under_any_seed(branches: Branches | None) -> None:
    """So many are dealt out; a seed renames units only among those with as many holders."""
    numbers = [2, 4] * 48
    tables = [
        assignment.balanced(equal_units(96), num_subnetworks=8, num_holders=numbers, seed=seed, branches=branches)
        for seed in range(4)
    ]
    for holders in tables:
        check(holders, numbers, 8)
    assert len(set(tables)) == 4


def sum_of_squares(table: Ints, weights: Ints) -> int:
    """Of what the pairs of subnetworks share."""
    overlaps = np.triu((table.T * weights) @ table, 1)
    return int((overlaps**2).sum())


@pytest.mark.parametrize("seed", range(4))
def test_no_swap_would_spread_a_searched_table_better(seed: int) -> None:
    """Tried one by one: units that cost nothing but weigh what they train."""
    draw, k = random.Random(seed), 5
    numbers = [draw.choice([1, 2, 4]) for _ in range(9)]
    costs = [UnitCost(draw.randrange(1, 9) * number, 0, 0) for number in numbers]
    table = search(costs, k, numbers)
    weights = np.array([cost.num_parameters // number for cost, number in zip(costs, numbers, strict=True)])
    for a, b in permutations(range(k), 2):
        for u, v in permutations(range(len(costs)), 2):
            if table[[u, v, u, v], [a, b, b, a]].tolist() == [1, 1, 0, 0]:
                swapped = table.copy()
                swapped[[u, v, u, v], [a, b, b, a]] = 0, 0, 1, 1
                assert sum_of_squares(swapped, weights) >= sum_of_squares(table, weights)


def test_weights_and_limits_by_hand() -> None:
    """Six elements for one holder, two for each of three; 1.05 of (1 * 40 + 3 * 120) / 4."""
    problem = Problem.of([UnitCost(6, 400, 40), UnitCost(6, 1200, 120)], 4, [1, 3])
    assert problem.weights.tolist() == [3, 1]
    assert problem.limits().tolist() == [105, 1050]


def test_a_perfect_table_of_two_numbers() -> None:
    """Each pair of four once, of weight 2, and all four together, of weight 1: six pairs share 3 each."""
    holders = (*combinations(range(4), 2), (0, 1, 2, 3))
    problem = Problem.of([UnitCost(4, 0, 0)] * 7, 4, [len(subnetworks) for subnetworks in holders])
    found = sum_of_squares(incidence(holders, 4), problem.weights)
    assert found == 6 * 3**2
    assert problem.is_perfect(found)
    assert not problem.is_perfect(found + 1)


@pytest.mark.parametrize("k", [4, 8])
def test_a_profile_over_a_decoder_is_balanced_and_mixes(k: int) -> None:
    """Of 24 layers: searched for at both sizes (at most 4k sets exist at k = 4)."""
    costs = [ATTENTION, MLP] * 24
    numbers = [max(1, k - layer * k // 32) for layer in range(24) for _ in range(2)]
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=numbers)
    check(holders, numbers, k)
    assert len(set(holders)) <= 4 * k
    for amounts in ([cost.flops for cost in costs], [cost.num_bytes for cost in costs]):
        found = loads(holders, amounts, k)
        assert max(found) * k <= 1.05 * sum(found)
    # All pairs would share equally at the bound; p is the mean over units.
    mean = sum(numbers) / len(numbers)
    assert spectral_gap(holders, [1] * len(costs), k) > 0.85 * k * (mean - 1) / (mean * (k - 1))


@pytest.mark.parametrize(("k", "num_layers"), [(8, 12), (16, 6)])
def test_heads_and_groups_are_dealt_evenly_over_all_numbers(k: int, num_layers: int) -> None:
    """More units than 4k, whose branches have different numbers: few sets, even widths, balanced."""
    costs, branches = model(num_layers, k, 2 * k)
    of_layer = [k // 4 * (1 + layer % 4) for layer in range(num_layers)]
    numbers = [of_layer[layer] for layer in range(num_layers) for _ in range(3 * k)]
    assert len(costs) > 4 * k
    assert comb(k, k // 2) > 4 * k
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=numbers, branches=branches)
    check(holders, numbers, k)
    assert len(set(holders)) <= 4 * k + 1  # and the set of all, for those that stay whole
    for name, found in widths(holders, branches, k).items():
        assert min(found) >= 1
        assert max(found) - min(found) <= 1, name
    found = loads(holders, [cost.flops for cost in costs], k)
    assert max(found) * k <= 1.05 * sum(found)


def test_different_numbers_inside_one_branch() -> None:
    branches: Branches = ["mlp"] * 6
    holders = assignment.balanced(equal_units(6), num_subnetworks=4, num_holders=[1, 1, 1, 1, 3, 3], branches=branches)
    check(holders, [1, 1, 1, 1, 3, 3], 4)
    assert min(widths(holders, branches, 4)["mlp"]) >= 1


def test_too_few_of_one_number_in_a_branch_to_deal_out() -> None:
    branches: Branches = ["mlp"] * 80
    numbers = [1] * 3 + [4] * 77
    with pytest.raises(ValueError, match="'mlp': its units have different numbers of holders, and only 3 have 1"):
        assignment.balanced(equal_units(80), num_subnetworks=8, num_holders=numbers, branches=branches)


@pytest.mark.parametrize("large", [1, 50])
def test_a_whole_unit_serves_its_branch(large: int) -> None:
    """However few units of another number are beside it, and whatever they weigh."""
    branches: Branches = ["mlp"] * 80
    numbers = [8] + [1] * 3 + [4] * 76
    costs = [UnitCost(10, 20, 30 * large)] * 4 + equal_units(76)
    check(assignment.balanced(costs, num_subnetworks=8, num_holders=numbers, branches=branches), numbers, 8)
    numbers, costs, branches = numbers + numbers[:4], costs + costs[:4], branches + ["attention"] * 4
    check(assignment.balanced(costs, num_subnetworks=8, num_holders=numbers, branches=branches), numbers, 8)


def test_too_few_holders_in_all() -> None:
    with pytest.raises(
        ValueError, match="3 units with 1 to 2 holders, 5 in all cannot give each of 8 subnetworks a unit"
    ):
        assignment.balanced(equal_units(3), num_subnetworks=8, num_holders=[1, 2, 2])
    with pytest.raises(ValueError, match="one for each of 3 units; got 2"):
        assignment.balanced(equal_units(3), num_subnetworks=2, num_holders=[1, 2])


def test_nodes_of_units_of_which_some_stay_whole() -> None:
    """The whole ones count for nothing between nodes; with two numbers beside them it stays with "balanced"."""
    costs, nodes = equal_units(34), [0] * 4 + [1] * 4
    numbers = [8] + [4] * 32 + [8]
    balanced = assignment.balanced(costs, num_subnetworks=8, num_holders=numbers)
    found = on_few_nodes(costs, balanced, nodes)
    assert found is not None
    assert [len(holders) for holders in found] == numbers
    alone = on_few_nodes(costs[1:-1], balanced[1:-1], nodes)
    assert found[1:-1] == alone
    mixed = assignment.balanced(costs, num_subnetworks=8, num_holders=[2, *numbers[1:]])
    assert on_few_nodes(costs, mixed, nodes) is None
