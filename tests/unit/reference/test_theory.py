"""The masked average of real gradients against tests/helpers/theory.py: unbiased, as near as the gap permits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches, unit_costs, units_of_branches
from sdp_deepspeed.plan.assign import assign
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import local_gradients, masked_average
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.models import batches, llama, loss_of
from tests.helpers.theory import (
    Gradients,
    dense_gradients,
    deviation,
    distance,
    mean,
    permitted,
    similarity,
    worker_gradients,
)

EPS = 2.0**-24  # unit roundoff of fp32
LAYERS = ["model.layers.0", "model.layers.1"]


def plan_of(model: nn.Module, strategy: str, k: int, p: int, regime: str = "backward", replicas: int = 1) -> Plan:
    units = units_of_branches(locate_branches(model), strategy=strategy, num_subnetworks=k)
    holders = assign(unit_costs(model, units), [p] * len(units), k)
    return Plan(regime, strategy, k, p, 0, tuple(units), holders, tuple(i // replicas for i in range(k * replicas)))


def weights_of(model: nn.Module, plan: Plan) -> list[int]:
    return [cost.num_parameters for cost in unit_costs(model, plan.units)]


def average_of(model: nn.Module, plan: Plan, own: Sequence[Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return masked_average(model, plan, worker_gradients(model, plan, own, loss_of))


# Unbiasedness


@pytest.mark.parametrize("strategy", ["block", "neuron"])
@pytest.mark.parametrize(("k", "p", "replicas"), [(2, 1, 1), (3, 2, 1), (4, 1, 1), (4, 3, 1), (5, 5, 1), (2, 1, 2)])
def test_same_batch_on_all_workers_gives_the_dense_gradient(strategy: str, k: int, p: int, replicas: int) -> None:
    """The same number up to k r times, added and divided: k r roundings of at most EPS each."""
    model = llama()
    plan = plan_of(model, strategy, k, p, replicas=replicas)
    micro = next(batches(1, 2))[0]
    own = [micro] * (k * replicas)
    dense = dense_gradients(model, plan, own, loss_of)[0]
    average = average_of(model, plan, own)
    assert all(value.any() for value in dense.values())
    for name, value in dense.items():
        torch.testing.assert_close(average[name], value, rtol=k * replicas * EPS, atol=0, msg=name)
    assert deviation(plan, [dense] * (k * replicas)) == 0.0


def test_distance_counts_each_unit_for_its_own_holders() -> None:
    """The average misses the mean by 3 in a unit of one subnetwork of two, and by 2 in one of both."""
    units = tuple(Unit(name, (Piece(name, None, 0, 1),)) for name in "ab")
    plan = Plan("backward", "block", 2, None, 0, units, ((0,), (0, 1)), (0, 1))
    own = [{"a": torch.tensor([a]), "b": torch.tensor([1.0])} for a in (0.0, 2.0)]
    average = {"a": torch.tensor([4.0]), "b": torch.tensor([3.0])}
    assert distance(plan, average, own) == 9 / 2 + 4


# Similarity


def test_similarity_by_hand() -> None:
    """l.1: (3, 4) to (3, 0) and 0 to 4 is 9 / (5 * 5); l.10 is no part of it; head: opposite; norm: zero."""
    vectors = {
        "embed.weight": ([1.0, 2.0], [2.0, 4.0]),
        "l.1.a.weight": ([3.0, 4.0], [3.0, 0.0]),
        "l.1.b": ([0.0], [4.0]),
        "l.10.b": ([1.0, 0.0], [1.0, 1.0]),
        "norm.weight": ([0.0], [1.0]),
        "head": ([2.0], [-7.0]),
    }
    average, full = ({name: torch.tensor(pair[i]) for name, pair in vectors.items()} for i in (0, 1))
    found = similarity(average, full, ["l.1", "l.10"])
    assert list(found) == ["embed", "l.1", "l.10", "norm", "head"]
    assert list(found.values()) == pytest.approx([1.0, 9 / 25, 0.5**0.5, 0.0, -1.0])


@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_similarity_of_both_regimes(strategy: str) -> None:
    """Same batch: backward is the dense gradient. Different batches: a layer's shared part alone would be 1."""
    model = llama()
    same, different = next(batches(1, 1)) * 4, next(batches(4, 1))
    plans = {regime: plan_of(model, strategy, 4, 2, regime) for regime in ("forward", "backward")}
    found = {
        (regime, name): similarity(
            average_of(model, plan, own), mean(dense_gradients(model, plan, own, loss_of)), LAYERS
        )
        for regime, plan in plans.items()
        for name, own in (("same", same), ("different", different))
    }
    names = ["model.embed_tokens", *LAYERS, "model.norm", "lm_head"]
    assert all(list(value) == names for value in found.values())
    assert list(found["backward", "same"].values()) == pytest.approx([1.0] * 5, abs=1e-6)
    shared = [name for name in names if name not in LAYERS]
    assert [found["backward", "different"][name] for name in shared] == pytest.approx([1.0] * 3, abs=1e-6)
    for layer in LAYERS:
        assert found["forward", "same"][layer] < 0.999
        assert 0.3 < found["backward", "different"][layer] < 0.999


# Distance from the full average, real gradients: 4 workers, every placement of 4 batches

K = 4
PLACEMENTS = list(itertools.permutations(range(K)))


@functools.cache
def real_gradients(strategy: str, p: int) -> tuple[list[Gradients], list[Gradients], Plan, tuple[int, ...]]:
    """Averages of every placement, the workers' dense gradients, the plan and its weights."""
    model = llama()
    plan = plan_of(model, strategy, K, p)
    # Four tokens instead of all: what the batches have in common outweighs what they have not, |gbar|^2 > 20 V.
    own = [[micro % 4 for micro in worker] for worker in next(batches(K, 1, size=32))]
    dense: list[Gradients] = [*dense_gradients(model, plan, own, loss_of)]
    # Worker i with batch j, by the oracle; a placement only chooses among these.
    table = [[local_gradients(model, plan, worker, batch, loss_of)[1] for batch in own] for worker in range(K)]
    averages: list[Gradients] = [
        masked_average(model, plan, [table[worker][batch] for worker, batch in enumerate(placement)])
        for placement in PLACEMENTS
    ]
    return averages, dense, plan, tuple(weights_of(model, plan))


@functools.cache
def real_distances(strategy: str, p: int) -> tuple[list[float], float, Plan, tuple[int, ...]]:
    """T of every placement, V, the plan and its weights."""
    averages, dense, plan, weights = real_gradients(strategy, p)
    return [distance(plan, average, dense) for average in averages], deviation(plan, dense), plan, weights


@pytest.mark.parametrize(("strategy", "p"), list(itertools.product(["block", "neuron"], [1, 2, 3])))
def test_the_spectral_gap_bounds_the_distance(strategy: str, p: int) -> None:
    """The mean over placements is exact: fp32 averages of gradients that differ by about their own size have a few EPS
    of relative error in T. A division by ranks in place of holders would have C (1 - C)^2 |gbar|^2 on top."""
    distances, size, plan, weights = real_distances(strategy, p)
    assert np.mean(distances) == pytest.approx(permitted(plan).expected * size, rel=1e-5)
    for bound in (permitted(plan, weights), permitted(plan)):
        assert 0 < np.mean(distances) <= (1 + 1e-5) * bound.on_average * size
        assert max(distances) <= bound.always * size
