"""Many units from few holder sets: their number, coverage, widths, balance and spectral gap."""

from __future__ import annotations

import hashlib
import random
from functools import partial
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.plan.assignment import deal as dealing
from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.plan.assignment.graph import incidence, is_connected
from sdp_deepspeed.plan.assignment.problem import Problem
from sdp_deepspeed.units import UnitCost
from tests.helpers.assignment_tables import (
    ATTENTION,
    MLP,
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
from tests.helpers.properties import examples, is_thorough, large

pytestmark = pytest.mark.slow

Case = tuple[list[UnitCost], Branches | None]


def blocks(num_layers: int) -> Case:
    return [ATTENTION, MLP] * num_layers, None


def growing(num_layers: int) -> Case:
    """No two layers are alike."""
    return [UnitCost(a, 2 * a, 2 * a) for layer in range(num_layers) for a in (20 + layer, 40 + 2 * layer)], None


def stepped(num_layers: int, num_heads: int, num_groups: int) -> Case:
    """Groups of 12 and 13 neurons in turn."""
    costs, branches = model(num_layers, num_heads, num_groups)
    groups = (UnitCost(12, 48, 24), UnitCost(13, 52, 26))
    is_mlp = [str(name).endswith("mlp") for name in branches]
    return [groups[i % 2] if mlp else cost for i, (cost, mlp) in enumerate(zip(costs, is_mlp, strict=True))], branches


def unlike(num_layers: int) -> Case:
    """Every layer has another number of heads and groups, of other sizes."""
    order = random.Random(1)
    costs: list[UnitCost] = []
    branches: Branches = []
    for layer in range(num_layers):
        for part in ("attention", "mlp"):
            size, count = order.randrange(20, 60), order.randrange(4, 12)
            costs += [UnitCost(size, 2 * size, 2 * size)] * count
            branches += [f"{layer}.{part}"] * count
    return costs, branches


# What the search over all units reached (commit 27e83d6), with as many sets as came: k, p, sets, spectral gap, and the
# largest FLOPs of a subnetwork, divided by their mean.
BEFORE = {
    "20 layers": (blocks(20), 8, 4, 35, 0.8500, 1.0),
    "32 layers": (blocks(32), 8, 4, 44, 0.8468, 1.0),
    "80 layers": (blocks(80), 8, 4, 67, 0.8542, 1.0),
    "32 layers, 3/8": (blocks(32), 8, 3, 46, 0.7407, 1.0),
    "80 layers, 5/8": (blocks(80), 8, 5, 56, 0.9125, 1.0),
    "20 layers, k = 7": (blocks(20), 7, 3, 25, 0.7627, 1.0173),
    "48 layers, k = 9": (blocks(48), 9, 3, 62, 0.7500, 1.0),
    "48 layers, k = 10": (blocks(48), 10, 5, 84, 0.8833, 1.0),
    "48 layers, k = 12": (blocks(48), 12, 3, 83, 0.7054, 1.0233),
    "80 layers, 3/4": (blocks(80), 12, 9, 119, 0.9691, 1.0),
    "48 layers, 1/4": (blocks(48), 16, 4, 94, 0.7800, 1.0233),
    "80 layers, k = 16": (blocks(80), 16, 8, 160, 0.9305, 1.0),
    "80 layers, k = 24": (blocks(80), 24, 12, 160, 0.9532, 1.0070),
    "80 layers, k = 32": (blocks(80), 32, 8, 160, 0.8901, 1.0140),
    "growing layers": (growing(40), 8, 4, 52, 0.8560, 1.0008),
    "12 heads": (model(12, 12, 8), 8, 4, 70, 0.8554, 1.0),
    "12 heads, 6/8": (model(12, 12, 8), 8, 6, 28, 0.9515, 1.0),
    "5 heads, 7 groups": (model(6, 5, 7), 8, 4, 48, 0.8495, 1.0),
    "8 heads, a third": (model(24, 8, 12), 12, 4, 304, 0.8157, 1.0),
    "8 heads, a quarter": (model(24, 8, 16), 16, 4, 517, 0.7965, 1.0),
    "groups of two sizes": (stepped(24, 8, 8), 8, 4, 70, 0.8568, 1.0),
    "groups of two sizes, k = 16": (stepped(24, 8, 16), 16, 8, 562, 0.9328, 1.0004),
    "unlike layers": (unlike(24), 8, 4, 67, 0.8559, 1.0005),
}
BEFORE_LARGE = {
    "7B, neurons, 3/8 of 8": (model(32, 32, 8), 8, 3, 56, 0.7613, 1.0),
    "7B, neurons, k = 16": (model(32, 32, 16), 16, 8, 1434, 0.9330, 1.0),
    "7B, neurons, k = 32": (model(32, 32, 32), 32, 8, 2048, 0.9022, 1.0),
    "7B, neurons, k = 64": (model(32, 32, 64), 64, 32, 3072, 0.9835, 1.0),
    "7B, neurons, a quarter of 64": (model(32, 32, 64), 64, 16, 3072, 0.9513, 1.0),
}
CASES = [*BEFORE.values(), *(large(*case) for case in BEFORE_LARGE.values())]


@pytest.mark.parametrize(("case", "k", "p", "sets", "before", "flops"), CASES, ids=[*BEFORE, *BEFORE_LARGE])
def test_few_sets_are_as_good_as_many(case: Case, k: int, p: int, sets: int, before: float, flops: float) -> None:
    """The gap within 3%, FLOPs and bytes within 5% of their mean, and where they could be dealt out evenly, even."""
    costs, branches = case
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, branches=branches)
    check_table(holders, len(costs), k, p)
    assert len(set(holders)) <= 4 * k
    assert gap(holders, costs, k) >= 0.97 * before
    for amounts in ([cost.flops for cost in costs], [cost.num_bytes for cost in costs]):
        held = loads(holders, amounts, k)
        assert max(held) * k <= 1.05 * sum(held)
    if branches is not None:
        check_even(holders, branches, k, p)


@pytest.mark.parametrize(
    ("case", "k", "p"),
    [(blocks(32), 8, 4), (blocks(80), 16, 8), (model(12, 12, 8), 8, 4)],
    ids=["blocks", "k = 16", "12 heads"],
)
def test_equal_shares_where_units_allow_it(case: Case, k: int, p: int) -> None:
    costs, branches = case
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, branches=branches)
    assert len(set(loads(holders, [cost.flops for cost in costs], k))) == 1


@st.composite
def many_units(draw: st.DrawFn) -> tuple[list[UnitCost], Branches, int, int]:
    """(costs, branches, k, p): more than 4k units in branches of any size and as blocks, and more than 4k ways to hold
    one."""
    k = draw(st.integers(7, 16 if is_thorough() else 9))
    p = draw(st.integers(2, k - 2).filter(lambda p: comb(k, p) > 4 * k))
    branches: Branches = [None] * draw(st.integers(0, 2 * k))
    sizes = draw(st.lists(st.integers(-(-k // p), 2 * k), min_size=1, max_size=3))
    while len(branches) <= 4 * k:
        branches += [f"branch {len(branches)}.{i}" for i, size in enumerate(sizes) for _ in range(size)]
    return draw(costs_of(len(branches), 3)), branches, k, p


@examples(40)
@given(many_units(), st.integers(0, 3))
def test_any_model_has_few_sets(problem: tuple[list[UnitCost], Branches, int, int], seed: int) -> None:
    costs, branches, k, p = problem
    again = partial(assignment.balanced, costs, num_subnetworks=k, num_holders=p, seed=seed, branches=branches)
    assert len(set(checked(again, branches, k, p))) <= 4 * k


@pytest.mark.parametrize(
    ("case", "p", "seed", "expected"),
    [(blocks(32), 4, 0, "62371ef3d867845a"), (stepped(4, 12, 8), 3, 3, "43b37bbbfc0720e1")],
    ids=["blocks", "branches"],
)
def test_known_plan_stays(case: Case, p: int, seed: int, expected: str) -> None:
    """Platforms and releases must agree on the plan, or ranks with different versions would not start together."""
    costs, branches = case
    holders = assignment.balanced(costs, num_subnetworks=8, num_holders=p, seed=seed, branches=branches)
    assert hashlib.sha256(repr(holders).encode()).hexdigest()[:16] == expected


def test_costs_decide_where_what_is_left_goes() -> None:
    """41 units of 4 holders for 8 subnetworks are 20.5 for each: 20 or 21."""
    holders = assignment.balanced(equal_units(41), num_subnetworks=8, num_holders=4)
    assert sorted(loads(holders, [1] * 41, 8)) == [20] * 4 + [21] * 4


def test_heavy_units_are_balanced_by_light_ones() -> None:
    """The heaviest 3 have as many FLOPs as 30 others."""
    costs = [UnitCost(10, 10, 10)] * 3 + [UnitCost(1, 1, 1)] * 60
    holders = assignment.balanced(costs, num_subnetworks=8, num_holders=4)
    held = loads(holders, [cost.flops for cost in costs], 8)
    assert max(held) * 8 <= 1.05 * sum(held)


def test_widths_give_way_to_flops() -> None:
    """Of three blocks of 24 half of the subnetworks have two, so they take 36 of the 96 units of 1, the others 60."""
    costs = [UnitCost(24, 24, 24)] * 3 + [UnitCost(1, 1, 1)] * 96
    branches: Branches = [None, None, None, *["layers.0.mlp"] * 48, *["layers.1.mlp"] * 48]
    holders = assignment.balanced(costs, num_subnetworks=8, num_holders=4, branches=branches)
    held = loads(holders, [cost.flops for cost in costs], 8)
    assert max(held) * 8 <= 1.05 * sum(held)
    assert all(min(found) >= 1 for found in widths(holders, branches, 8).values())


def test_widths_that_give_way_leave_a_unit_of_each_branch() -> None:
    """Half of the subnetworks have two of the three blocks; both units of 12 for the others would even that out."""
    costs = [UnitCost(24, 24, 24)] * 3 + [UnitCost(12, 12, 12)] * 2 + [UnitCost(1, 1, 1)] * 48
    branches: Branches = [None, None, None, *["layers.0.mlp"] * 2, *["layers.1.mlp"] * 48]
    holders = assignment.balanced(costs, num_subnetworks=8, num_holders=4, branches=branches)
    assert all(min(found) >= 1 for found in widths(holders, branches, 8).values())


def test_bytes_are_balanced_after_flops() -> None:
    costs = [UnitCost(1, 10 + 7 * i % 31, 100) for i in range(64)]
    holders = assignment.balanced(costs, num_subnetworks=8, num_holders=4)
    for amounts in ([cost.flops for cost in costs], [cost.num_bytes for cost in costs]):
        held = loads(holders, amounts, 8)
        assert max(held) * 8 <= 1.05 * sum(held)


def test_what_is_not_trained_is_spread_too() -> None:
    """Only the last unit trains, and the graph counts the others as well."""
    costs = [UnitCost(0, 20, 30)] * 40 + [UnitCost(10, 20, 30)]
    holders = assignment.balanced(costs, num_subnetworks=8, num_holders=4)
    check_table(holders, 41, 8, 4)
    assert gap(holders, equal_units(41), 8) > 0.83


def test_sets_that_fall_apart_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """More important than their number."""
    halves = incidence([(0, 1, 2, 3), (4, 5, 6, 7)], 8)[None]
    monkeypatch.setattr(dealing, "find_rounds", lambda *_: halves)
    table = dealing.deal(Problem.of(equal_units(40), 8, [4] * 40))
    assert is_connected(table)
    assert np.array_equal(table.sum(axis=0), [20] * 8)


@pytest.mark.parametrize(("num_units", "k", "p"), [(32, 8, 4), (33, 8, 4), (64, 8, 1), (64, 8, 7)])
def test_few_units_or_few_ways_to_hold_one_need_no_limit(num_units: int, k: int, p: int) -> None:
    """Up to 4k units have the plans that they had before there was a limit."""
    holders = assignment.balanced(equal_units(num_units), num_subnetworks=k, num_holders=p)
    assert (holders == searched(num_units, k, p)) == (num_units <= 4 * k or comb(k, p) <= 4 * k)


def searched(num_units: int, k: int, p: int) -> assignment.Holders:
    return assignment.to_holders(assignment.search(equal_units(num_units), k, [p] * num_units))
