"""Assignments: exact coverage, balance, connectedness, spectral gap, determinism."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.units import UnitCost
from tests.helpers.assignment_tables import ATTENTION, MLP, check_table, counts, equal_units, gap, loads
from tests.helpers.properties import examples, large

pytestmark = pytest.mark.slow


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[UnitCost], int, int]:
    num_units, k, p = draw(counts())
    kinds = draw(st.lists(st.tuples(*[st.integers(0, 1000)] * 3), min_size=1, max_size=3))
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=num_units, max_size=num_units))
    return [UnitCost(*kind) for kind in drawn], k, p


@examples(50)
@given(problems(), st.integers(0, 3))
def test_balanced_is_exact_connected_and_repeatable(problem: tuple[list[UnitCost], int, int], seed: int) -> None:
    costs, k, p = problem
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, seed=seed)
    check_table(holders, len(costs), k, p)
    assert holders == assignment.balanced(costs, num_subnetworks=k, num_holders=p, seed=seed)


@examples(50)
@given(counts())
def test_cyclic_is_exact_and_connected(problem: tuple[int, int, int]) -> None:
    num_units, k, p = problem
    check_table(assignment.cyclic(num_units, num_subnetworks=k, num_holders=p), num_units, k, p)


@examples(30)
@given(problems())
def test_seed_breaks_ties_only(problem: tuple[list[UnitCost], int, int]) -> None:
    costs, k, p = problem
    tables = [assignment.balanced(costs, num_subnetworks=k, num_holders=p, seed=seed) for seed in (0, 7)]
    flops = [sorted(loads(table, [cost.flops for cost in costs], k)) for table in tables]
    assert flops[0] == flops[1]
    assert gap(tables[0], costs, k) == pytest.approx(gap(tables[1], costs, k), abs=1e-9)


def test_seed_has_an_effect() -> None:
    tables = {assignment.balanced(equal_units(14), num_subnetworks=8, num_holders=4, seed=s) for s in range(4)}
    assert len(tables) > 1


@examples(30)
@given(st.integers(2, 8), st.integers(1, 4), st.data())
def test_layers_are_balanced_to_five_percent(k: int, layers_per_subnetwork: int, data: st.DataObject) -> None:
    """Units allow it exactly: each kind can be dealt out evenly."""
    p = data.draw(st.integers(1, k))
    costs = [ATTENTION, MLP] * (k * layers_per_subnetwork)
    holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p)
    for amounts in ([cost.flops for cost in costs], [cost.num_bytes for cost in costs]):
        result = loads(holders, amounts, k)
        assert max(result) * k <= 1.05 * sum(result)


# (trainable elements, bytes, FLOPs) of units whose FLOPs can be balanced to 5%, which one part of the search ensures.
UNEVEN = {
    "greedy alone is not enough": (
        4,
        1,
        "6 20 58, 6 20 47, 15 20 19, 2 20 30, 17 20 18, 7 50 49, 16 50 31, 4 10 18, 9 10 15, 18 20 13",
    ),
    "bytes must not undo FLOPs": (
        3,
        1,
        "4 50 58, 15 50 51, 13 10 16, 16 10 34, 14 20 58, 1 20 38, 9 20 24, 19 10 30, 1 10 11, 18 10 34",
    ),
    "even sharing must not undo FLOPs": (
        6,
        5,
        "15 20 11, 8 20 21, 18 20 21, 3 20 26, 2 20 14, 3 10 38, 1 50 25, 9 10 49, 6 50 28, 3 10 20",
    ),
}


@pytest.mark.parametrize(("k", "p", "figures"), UNEVEN.values(), ids=list(UNEVEN))
def test_uneven_units(k: int, p: int, figures: str) -> None:
    costs = [UnitCost(*map(int, unit.split())) for unit in figures.split(",")]
    result = loads(assignment.balanced(costs, num_subnetworks=k, num_holders=p), [cost.flops for cost in costs], k)
    assert max(result) * k <= 1.05 * sum(result)


def test_bytes_are_balanced_after_flops() -> None:
    """Equal FLOPs, so only bytes tell units apart."""
    costs = [UnitCost(1, b, 100) for b in (50, 30, 10, 30, 20, 40, 50, 10)]
    holders = assignment.balanced(costs, num_subnetworks=4, num_holders=1)
    assert loads(holders, [cost.flops for cost in costs], 4) == [200] * 4
    assert max(loads(holders, [cost.num_bytes for cost in costs], 4)) == 60  # all equal


@pytest.mark.parametrize(
    ("num_units", "expected", "cyclic"),
    [(14, 0.857, 0.6), (16, 0.80, 0.574)],
    ids=["14 units: the 3-(8,4,1) design", "16 units"],
)
def test_spectral_gap_is_near_its_bound(num_units: int, expected: float, cyclic: float) -> None:
    """8 (4 - 1) / (4 (8 - 1)) = 0.857 for equal units, which the design reaches; cyclic windows are far from it."""
    costs = equal_units(num_units)
    best = assignment.balanced(costs, num_subnetworks=8, num_holders=4)
    windows = assignment.cyclic(num_units, num_subnetworks=8, num_holders=4)
    assert gap(best, costs, 8) >= expected
    assert gap(windows, costs, 8) < cyclic


def test_equal_sums_of_squares_are_told_apart() -> None:
    """16 units of 2 holders: without the fourth powers the search ends at a gap of 0.323."""
    costs = equal_units(16)
    assert gap(assignment.balanced(costs, num_subnetworks=8, num_holders=2), costs, 8) > 0.49


def test_known_plan_stays() -> None:
    """Platforms and releases must agree on the plan, or ranks with different versions would not start together."""
    assert assignment.balanced(equal_units(6), num_subnetworks=4, num_holders=2) == (
        (1, 2),
        (0, 3),
        (2, 3),
        (0, 1),
        (0, 2),
        (1, 3),
    )
    assert assignment.cyclic(6, num_subnetworks=4, num_holders=2) == ((0, 1), (1, 2), (2, 3), (0, 3), (0, 1), (2, 3))


def test_all_hold_everything_at_full_coverage() -> None:
    assert assignment.balanced(equal_units(3), num_subnetworks=4, num_holders=4) == ((0, 1, 2, 3),) * 3


@pytest.mark.parametrize(("num_units", "k", "p"), [(3, 4, 1), (1, 3, 2), (0, 2, 1)])
def test_too_few_units(num_units: int, k: int, p: int) -> None:
    words = f"{p} holders each" if num_units else "no holders"
    with pytest.raises(ValueError, match=rf"{num_units} units with {words} cannot give each of {k} .*; use"):
        assignment.balanced(equal_units(num_units), num_subnetworks=k, num_holders=p)
    with pytest.raises(ValueError, match="cannot give"):
        assignment.cyclic(num_units, num_subnetworks=k, num_holders=p)


@pytest.mark.parametrize("p", [0, 5])
def test_impossible_holders(p: int) -> None:
    with pytest.raises(ValueError, match=f"must be 1 to 4 .*, got {p}"):
        assignment.balanced(equal_units(8), num_subnetworks=4, num_holders=p)


@pytest.mark.parametrize(("num_units", "k", "p"), [large(128, 64, 32), large(64, 256, 128)])
def test_large_problems_end(num_units: int, k: int, p: int) -> None:
    """The limit is loose, for slow machines: what it guards against takes minutes."""
    start = time.monotonic()
    holders = assignment.balanced([ATTENTION, MLP] * (num_units // 2), num_subnetworks=k, num_holders=p)
    assert time.monotonic() - start < 30
    check_table(holders, num_units, k, p)
    assert gap(holders, [ATTENTION, MLP] * (num_units // 2), k) > 0.9
