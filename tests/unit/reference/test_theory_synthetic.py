"""The proposition of docs/theory.md on made-up gradients: it holds for any, and some reach its bounds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sdp_deepspeed.plan.assign import incidence, translates
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import held_mask, masked_average
from sdp_deepspeed.units import Piece, Subnetworks, Unit
from tests.helpers.models import loss_of
from tests.helpers.properties import examples
from tests.helpers.theory import dense_gradients, deviation, distance, mean, permitted


def synthetic(holders: Sequence[Subnetworks], k: int, weights: Sequence[int]) -> tuple[nn.Module, Plan]:
    """Units of `weights` elements, each a parameter of its own."""
    model = nn.Module()
    for unit, weight in enumerate(weights):
        model.register_parameter(f"u{unit}", nn.Parameter(torch.zeros(weight)))
    units = tuple(Unit(name, (Piece(name, None, 0, p.numel()),)) for name, p in model.named_parameters())
    return model, Plan("backward", "block", k, len(holders[0]), 0, units, tuple(holders), tuple(range(k)))


def distance_of(model: nn.Module, plan: Plan, gradients: Sequence[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """T and V of dense gradients, averaged over the holders by the oracle."""
    masks = [held_mask(model, plan, worker) for worker in range(plan.num_subnetworks)]
    own = [
        {name: value * masks[plan.subnetwork_of_rank[rank]][name] for name, value in gradient.items()}
        for rank, gradient in enumerate(gradients)
    ]
    return distance(plan, masked_average(model, plan, own), gradients), deviation(plan, gradients)


def drift(model: nn.Module, coefficients: Sequence[float]) -> list[dict[str, torch.Tensor]]:
    """Worker j is off by its coefficient in every element, so by coefficient^2 * weight in each unit; plus a mean."""
    return [{name: torch.full(p.shape, 7.0 + c) for name, p in model.named_parameters()} for c in coefficients]


def gossip(plan: Plan, weights: Sequence[int]) -> np.ndarray:
    """W, row by row as docs/design.md writes it."""
    table = incidence(plan.holders, plan.num_subnetworks)
    overlaps = table.T @ np.diag(weights) @ table / len(plan.holders[0])
    return overlaps / overlaps.sum(axis=1, keepdims=True)


@st.composite
def tables(draw: st.DrawFn) -> tuple[tuple[Subnetworks, ...], int, list[int]]:
    k = draw(st.integers(2, 6))
    p = draw(st.integers(1, k))
    choice = st.sampled_from(list(itertools.combinations(range(k), p)))
    holders = translates(tuple(range(p)), k) + tuple(draw(st.lists(choice, max_size=6)))
    return holders, k, draw(st.lists(st.integers(1, 9), min_size=len(holders), max_size=len(holders)))


@given(tables(), st.integers(0, 2**31))
@examples(60)
def test_the_proposition_for_any_table_weights_and_gradients(
    table: tuple[tuple[Subnetworks, ...], int, list[int]], seed: int
) -> None:
    """(a), (b) and (d); fp32 gradients of size 7, fp64 sums: absolute errors far below 1e-3 of V."""
    holders, k, weights = table
    model, plan = synthetic(holders, k, weights)
    p, rho, bound = len(holders[0]), plan.spectral_gap(weights), permitted(plan, weights)
    assert np.diag(gossip(plan, weights)) == pytest.approx(1 / p)
    assert 1 - rho >= (k - p) / (p * (k - 1)) - 1e-9
    generator = torch.Generator().manual_seed(seed)
    arbitrary = [
        {name: torch.randn(x.shape, generator=generator) for name, x in model.named_parameters()} for _ in range(k)
    ]
    apart, size = distance_of(model, plan, arbitrary)
    assert apart <= bound.always * size + 1e-3 * size
    apart, size = distance_of(model, plan, drift(model, torch.randn(k, generator=generator).tolist()))
    assert apart <= bound.drift * size + 1e-3 * size


def test_no_better_bound_for_any_placement() -> None:
    """All pairs of 4 workers: rho reaches its bound, and units whose holders deviate together reach (b)."""
    holders = tuple(itertools.combinations(range(4), 2))
    model, plan = synthetic(holders, 4, [1] * 6)
    assert 1 - plan.spectral_gap() == pytest.approx((4 - 2) / (2 * 3))
    gradients = [{f"u{u}": torch.tensor([float(j in own)]) for u, own in enumerate(holders)} for j in range(4)]
    apart, size = distance_of(model, plan, gradients)
    assert apart == pytest.approx(permitted(plan).always * size)
    assert apart == pytest.approx(0.5 * 3 * (1 / 3) * size)


def test_drift_along_the_second_eigenvector_reaches_the_bound() -> None:
    """Six workers in a ring, p = 2: lambda_2 = (1 + cos 60 degrees) / 2 = 3/4, eigenvector cos(60 degrees * i)."""
    model, plan = synthetic(translates((0, 1), 6), 6, [3] * 6)
    assert 1 - plan.spectral_gap() == pytest.approx(0.75)
    apart, size = distance_of(model, plan, drift(model, np.cos(np.arange(6) * np.pi / 3).tolist()))
    assert permitted(plan).drift == pytest.approx(permitted(plan).on_average) == pytest.approx(0.75 / 3)
    assert apart == pytest.approx(0.25 * size, rel=1e-5)


def test_unbalanced_loads_need_the_wider_bound() -> None:
    """A star with one heavy unit: rho = 1/2, but a drift of workers 0 and 1 against 2 and 3 leaves 8 of 10 in T / C.

    Their unit (weight 8) is off by 1, the other two (weight 1) by 0, and V = 10. Loads are 10, 8, 1, 1 around 5, so
    e = (1, 0.6, -0.8, -0.8), mean(e^2) = 0.66, and (d) permits 0.5 * (1 + 1) + 0.5 * 0.66 = 1.33.
    """
    weights = [8, 1, 1]
    model, plan = synthetic(((0, 1), (0, 2), (0, 3)), 4, weights)
    apart, size = distance_of(model, plan, drift(model, [-1.0, -1.0, 1.0, 1.0]))
    bound = permitted(plan, weights)
    assert (apart, size) == (pytest.approx(0.5 * 8), pytest.approx(10))
    assert (bound.on_average, bound.drift) == (pytest.approx(0.5 * 0.5), pytest.approx(0.5 * 1.33))
    assert bound.on_average * size < apart <= bound.drift * size


def test_replicas_count_with_their_mean() -> None:
    """Two workers of two ranks each, gradients 1, 3 and 5, 11: means 2 and 8 around 5, so V = 9. Worker 0 holds u0."""
    model, single = synthetic(((0,), (1,)), 2, [1, 1])
    plan = Plan("backward", "block", 2, 1, 0, single.units, single.holders, (0, 0, 1, 1))
    gradients = [{"u0": torch.tensor([g]), "u1": torch.tensor([0.0])} for g in (1.0, 3.0, 5.0, 11.0)]
    assert mean(gradients)["u0"].item() == 5.0
    apart, size = distance_of(model, plan, gradients)
    assert (apart, size) == (0.5 * (2 - 5) ** 2, 9.0)


def test_one_worker_is_the_full_average() -> None:
    model, plan = synthetic(((0,),), 1, [2])
    assert distance_of(model, plan, drift(model, [1.0])) == (0.0, 0.0)
    assert dataclasses.astuple(permitted(plan)) == (0.0, 0.0, 0.0, 0.0)


def test_mistakes_are_named() -> None:
    model, plan = synthetic(((0, 1), (1, 2), (0, 2)), 3, [1, 1, 1])
    with pytest.raises(ValueError, match=r"gradients: got 1 entries, expected one for each of the plan's 3 ranks"):
        deviation(plan, drift(model, [0.0]))
    with pytest.raises(ValueError, match=r"batches: got 2"):
        dense_gradients(model, plan, [[0], [0]], loss_of)
    with pytest.raises(ValueError, match=r"regime: got 'forward'"):
        permitted(dataclasses.replace(plan, regime="forward"))
