"""Assignment: cyclic translates of flat base blocks, balance, connection, seeds; and the spectral gap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.plan.assign import MAX_SETS_PER_RANK, assign, base_blocks, translates
from sdp_deepspeed.plan.connectivity import incidence, num_components, spectral_gap
from sdp_deepspeed.units import Subnetworks, UnitCost

ATTENTION, MLP = UnitCost(40, 80, 90), UnitCost(80, 160, 160)


def block_of(holders: Subnetworks, k: int) -> Subnetworks:
    """The same for all translates of a set."""
    return min(tuple(sorted((one - first) % k for one in holders)) for first in holders)


def loads(holders: Sequence[Subnetworks], costs: Sequence[UnitCost], k: int) -> np.ndarray:
    return incidence(holders, k).T @ [cost.flops for cost in costs]


def bound(k: int, p: int) -> float:
    return k * (p - 1) / (p * (k - 1))


def test_gap_by_hand() -> None:
    """Three subnetworks, each pair shares one unit: W = (2 I + (J - I)) / 4 has eigenvalues 1, 1/4, 1/4. Unequal units:
    both hold one of weight 1, the first alone one of weight 2: eigenvalues 1 and 1/3. Different p: 1, 1/2, 0."""
    assert spectral_gap(((0, 1), (1, 2), (0, 2)), [1] * 3, 3) == pytest.approx(0.75)
    assert spectral_gap(((0, 1), (0,)), [1, 2], 2) == pytest.approx(2 / 3)
    assert spectral_gap(((0, 1, 2), (0, 1), (2,)), [1] * 3, 3) == pytest.approx(0.5)
    assert spectral_gap(((0, 1, 2),) * 4, [1] * 4, 3) == pytest.approx(1.0)
    assert spectral_gap(((0,),), [1], 1) == 1.0
    for holders, weights in ((((0, 1), (2, 3)), [1, 1]), (((0, 1), (1, 2), (2, 3)), [1, 0, 1])):
        assert spectral_gap(holders, weights, 4) == 0.0


@pytest.mark.parametrize(("k", "p"), [(k, p) for k in range(3, 17) for p in range(3, k)])
def test_gap_of_the_translates(k: int, p: int) -> None:
    """With as many base blocks as p allows."""
    sets = [one for block in base_blocks(k, p, max(1, MAX_SETS_PER_RANK // p)) for one in translates(block, k)]
    assert 0.75 * bound(k, p) <= spectral_gap(sets, [1] * len(sets), k) <= bound(k, p) + 1e-9


@pytest.mark.parametrize(("k", "p"), [(64, 8), (64, 32), (256, 8), (256, 128)])
def test_large_blocks_are_searched(k: int, p: int) -> None:
    """No difference occurs much more often than others."""
    (block,) = base_blocks(k, p)
    assert spectral_gap(translates(block, k), [1] * k, k) >= 0.7 * bound(k, p)
    counts = np.bincount([(a - b) % k for a in block for b in block if a != b], minlength=k)[1:]
    assert counts.max() <= 2 * max(1, counts.mean())


def test_blocks_that_are_even_cover_everything() -> None:
    """As eight heads of 64 subnetworks need it: one in each residue class."""
    (block,) = base_blocks(64, 8, even=(8,))
    assert {one % 8 for one in block} == set(range(8))


@pytest.mark.parametrize(("k", "p"), [(4, 2), (5, 2), (8, 2), (8, 3), (8, 4), (16, 4), (16, 8)])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_multiple_of_k_of_each_kind_is_balanced_exactly(k: int, p: int, layers: int) -> None:
    costs = [ATTENTION, MLP] * (layers * k)
    holders = assign(costs, [p] * len(costs), k)
    assert {len(one) for one in holders} == {p}
    assert len({*loads(holders, costs, k)}) == 1
    assert len({block_of(one, k) for one in holders}) <= MAX_SETS_PER_RANK // p
    assert incidence([*dict.fromkeys(holders)], k).sum(axis=0).max() <= MAX_SETS_PER_RANK


@pytest.mark.parametrize(
    ("layers", "k", "p"), [(12, 8, 4), (12, 8, 3), (10, 8, 4), (28, 16, 4), (40, 64, 8), (22, 16, 8), (32, 6, 3)]
)
def test_other_numbers_of_layers_are_balanced_too(layers: int, k: int, p: int) -> None:
    costs = [ATTENTION, MLP] * layers
    holders = assign(costs, [p] * len(costs), k)
    found = loads(holders, costs, k)
    assert found.max() <= 1.05 * found.mean()
    assert spectral_gap(holders, [cost.num_parameters for cost in costs], k) >= 0.7 * bound(k, p)


@given(st.data())
def test_any_units(data: st.DataObject) -> None:
    """Every subnetwork has a unit, and the graph is connected, wherever that is possible; few base blocks."""
    k = data.draw(st.integers(1, 12))
    p = data.draw(st.integers(1, k))
    kinds = st.sampled_from([ATTENTION, MLP, UnitCost(10, 20, 30), UnitCost(7, 300, 500)])
    costs = data.draw(st.lists(kinds, min_size=-(-k // p), max_size=20))
    holders = assign(costs, [p] * len(costs), k)
    assert all(list(one) == sorted({*one}) and len(one) == p for one in holders)
    assert {subnetwork for one in holders for subnetwork in one} == set(range(k))
    if len(costs) * (p - 1) >= k - 1:
        assert num_components(holders, k) == 1
    assert len({block_of(one, k) for one in holders}) <= max(1, MAX_SETS_PER_RANK // p) + 1
    assert holders == assign(costs, [p] * len(costs), k)


def test_as_few_units_as_connect_all_subnetworks() -> None:
    """A tree of 11 units, of which two are unlike the others: no balanced attempt finds it."""
    costs = [UnitCost(40, 80, 90)] * 9 + [UnitCost(7, 300, 500)] * 2
    assert num_components(assign(costs, [2] * 11, 12), 12) == 1


@given(st.data())
def test_every_subnetwork_has_a_head_or_group_of_each_branch(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 16))
    p = data.draw(st.integers(1, k))
    sizes = data.draw(st.lists(st.integers(-(-k // p), 2 * k), min_size=1, max_size=4))
    branches = [f"layers.{layer}" for layer, size in enumerate(sizes) for _ in range(size)]
    holders = assign([MLP] * len(branches), [p] * len(branches), k, branches=branches)
    for name in {*branches}:
        own = [one for one, branch in zip(holders, branches, strict=True) if branch == name]
        assert {subnetwork for one in own for subnetwork in one} == set(range(k))


@pytest.mark.parametrize(("heads", "k", "p"), [(8, 16, 8), (8, 64, 8), (12, 16, 8), (2, 8, 4)])
def test_branches_of_all_layers_together_are_balanced(heads: int, k: int, p: int) -> None:
    branches = [f"layers.{layer}" for layer in range(16) for _ in range(heads)]
    costs = [ATTENTION] * len(branches)
    found = loads(assign(costs, [p] * len(costs), k, branches=branches), costs, k)
    assert found.max() <= 1.05 * found.mean()


@pytest.mark.parametrize("branch", [None, "mlp"])
@pytest.mark.parametrize(("units", "k", "p"), [(8, 4, 2), (24, 8, 4), (30, 8, 3), (64, 16, 8)])
def test_another_seed_keeps_the_sets(units: int, k: int, p: int, branch: str | None) -> None:
    draws = [
        assign([MLP] * units, [p] * units, k, seed=seed, branches=[branch] * units if branch else None)
        for seed in range(4)
    ]
    assert len({*draws}) == 4
    assert len({frozenset(holders) for holders in draws}) == 1


@pytest.mark.parametrize(("layers", "k", "p"), [(6, 4, 2), (12, 8, 4), (16, 8, 3)])
def test_elements_are_balanced_too(layers: int, k: int, p: int) -> None:
    """As in the backward regime, where FLOPs may be of few elements: of two kinds of units each has most of one."""
    costs = [UnitCost(1000, 2000, 90), UnitCost(80, 160, 900), UnitCost(400, 800, 400)] * layers
    holders = assign(costs, [p] * len(costs), k, balance_elements=True)
    owned = incidence(holders, k).T @ [cost.num_parameters for cost in costs]
    assert owned.max() <= 1.05 * owned.mean()
    assert loads(holders, costs, k).max() <= 1.05 * loads(holders, costs, k).mean()


def test_units_with_different_numbers_of_holders() -> None:
    numbers = [2, 4, 8] * 8
    holders = assign([MLP] * 24, numbers, 8)
    assert [len(one) for one in holders] == numbers
    assert len({*loads(holders, [MLP] * 24, 8)}) == 1
    assert {p: len({block_of(one, 8) for one in holders if len(one) == p}) for p in (2, 4, 8)} == {2: 1, 4: 1, 8: 1}
