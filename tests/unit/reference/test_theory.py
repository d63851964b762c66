"""The proposition of docs/theory.md, which has its notation: the masked average is unbiased, and as near to the full
average as the spectral gap permits. On real gradients.

Proof.

(a) Let A = M diag(w) M^T with M_iu = 1 if i holds u, else 0, and L = diag(l) with the load l_i of worker i (the sum of
w_u over its units). The row sums of A are p l_i, so W = L^-1 A / p. It is similar to the positive semidefinite L^-1/2 A
L^-1/2 / p, and stochastic, so lambda_1 = 1. A_ii = l_i makes W_ii = 1/p and the trace k/p, hence k/p - 1 = lambda_2 +
... + lambda_k <= (k-1) lambda_2, with equality if and only if these are equal.

(b) With d_j = g_ju - gbar_u, which sum to zero, ghat_u - gbar_u = sum_j c_j d_j for c_j = [j in H(u)]/p - 1/k. The
sum of their squares is p (1/p - 1/k)^2 + (k-p)/k^2 = (k-p)/(pk), so by Cauchy-Schwarz |ghat_u - gbar_u|^2 <= (k-p)/(pk)
k V_u. Sum over u, multiply by C, and use (a). Equality in the first step: d_j proportional to c_j.

(c) H(u) then holds a uniform sample of p of the k batches without replacement. Its mean has variance (1/p)(1 - p/k)
times the sample variance V_u k/(k-1), in all (k-p) / (p (k-1)) V_u. Sum over u, multiply by C, and use (a).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.assign import assign
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import unit_costs, units_of_branches
from sdp_deepspeed.units import Unit
from tests.helpers.models import batches, llama, loss_of
from tests.reference.virtual_workers import local_gradients, masked_average

Gradients = Mapping[str, torch.Tensor]


def mean(gradients: Sequence[Gradients]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([own[name].double() for own in gradients]).mean(0) for name in gradients[0]}


def squared_distance(unit: Unit, a: Gradients, b: Gradients) -> float:
    pairs = [(p.narrow(a[p.parameter]).double(), p.narrow(b[p.parameter]).double()) for p in unit.pieces]
    return sum(float((one - other).square().sum()) for one, other in pairs)


def deviation(plan: Plan, gradients: Sequence[Gradients]) -> float:
    """V, of the dense gradients of each worker's batches."""
    full = mean(gradients)
    return sum(squared_distance(unit, own, full) for own in gradients for unit in plan.units) / len(gradients)


def distance(plan: Plan, average: Gradients, gradients: Sequence[Gradients]) -> float:
    """T, of the masked average."""
    full = mean(gradients)
    return sum(plan.coverage_of(u) * squared_distance(unit, average, full) for u, unit in enumerate(plan.units))


@dataclass(frozen=True)
class Permitted:
    """T / V in the proposition.

    Args:
        expected: (c), the exact mean over placements of batches.
        always: (b), for any gradients and placement.
        on_average: (c), the bound on that mean.
    """

    expected: float
    always: float
    on_average: float


def permitted(plan: Plan, weights: Sequence[int]) -> Permitted:
    rho, k, p = plan.spectral_gap(weights), plan.num_subnetworks, len(plan.holders[0])
    factors = ((k - p) / (p * (k - 1)), (k - 1) * (1 - rho), 1 - rho)
    return Permitted(*(plan.coverage * factor for factor in factors))


def plan_of(model: nn.Module, strategy: str, k: int, p: int) -> Plan:
    units = units_of_branches(proven_branches(model, "neuron"), strategy=strategy, num_subnetworks=k)
    holders = assign(unit_costs(model, units), [p] * len(units), k)
    return Plan("backward", strategy, k, 0, tuple(units), holders, tuple(range(k)))


def dense_gradients(model: nn.Module, plan: Plan, own: Sequence[Sequence[torch.Tensor]]) -> list[Gradients]:
    k = plan.num_subnetworks
    whole = Plan("backward", plan.strategy, k, 0, plan.units, (tuple(range(k)),) * len(plan.units), tuple(range(k)))
    return [local_gradients(model, whole, worker, batch, loss_of)[1] for worker, batch in enumerate(own)]


@pytest.mark.parametrize(("strategy", "p"), list(itertools.product(["block", "neuron"], [1, 2, 3])))
def test_the_spectral_gap_bounds_the_distance_of_real_gradients(strategy: str, p: int) -> None:
    """Over all placements of four batches, whose mean is exact: fp32 averages of gradients that differ by about their
    own size have a few roundoffs of relative error in T. A division by ranks in place of holders would have C (1 - C)^2
    |gbar|^2 on top, where |gbar|^2 > 20 V: of four tokens batches have more in common than not."""
    model, k = llama(), 4
    plan = plan_of(model, strategy, k, p)
    weights = [cost.num_parameters for cost in unit_costs(model, plan.units)]
    own = [[micro % 4 for micro in worker] for worker in next(batches(k, 1, size=32))]
    dense = dense_gradients(model, plan, own)
    table = [[local_gradients(model, plan, worker, batch, loss_of)[1] for batch in own] for worker in range(k)]
    distances = []
    for placement in itertools.permutations(range(k)):
        gradients = [table[worker][batch] for worker, batch in enumerate(placement)]
        distances.append(distance(plan, masked_average(model, plan, gradients), dense))
    size, bound = deviation(plan, dense), permitted(plan, weights)
    assert np.mean(distances) == pytest.approx(bound.expected * size, rel=1e-5)
    assert 0 < np.mean(distances) <= (1 + 1e-5) * bound.on_average * size
    assert max(distances) <= bound.always * size
