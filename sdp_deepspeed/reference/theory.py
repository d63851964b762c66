"""What the masked average is worth, measured: unbiased, how far from the full average, how similar layer by layer.

Notation of DESIGN.md section 1: k subnetworks ("workers" here; the replicas of one count as one worker with their mean
gradient), p holders H(u) of each maskable unit u, C = p / k. Worker j has the gradient g_ju of its own batch for u, and

    gbar_u = (1/k) sum_j g_ju                   full average, what data parallelism would apply
    ghat_u = (1/p) sum_{j in H(u)} g_ju         masked average
    V_u    = (1/k) sum_j |g_ju - gbar_u|^2      deviation of the workers, V = sum_u V_u
    T      = (1/k) sum_i sum_{u held by i} |ghat_u - gbar_u|^2 = C sum_u |ghat_u - gbar_u|^2

T is the mean square distance between the workers' masked averages and the full average (every u is held p times).
Shared parameters are averaged over everybody and enter neither V nor T. rho is the spectral gap, 1 - lambda_2(W).

Premise: the backward regime, whose forward pass and activation gradients are the dense model's. There g_ju is the
dense gradient of worker j's batch: it depends on the batch and not on who computes it, so that with the same batch on
all workers V = 0 and ghat_u = gbar_u = the dense gradient (unbiased). In the forward regime it depends on the worker's
other units, nobody computes gbar_u, and nothing below holds. It is the premise of Proposition 1 of arXiv 2507.09029,
of which we know no more than that: statement and proof are ours.

Proposition. Let 1 <= p <= k, k > 1, and let every worker hold a unit.
(a) 1 - rho >= (k-p) / (p (k-1)), for any weights of the units.
(b) For any gradients and any placement of the batches on the workers, T <= C (k-1) (1-rho) V.
(c) On average over uniformly random placements of k given batches, E[T] = C (k-p) / (p (k-1)) V <= C (1-rho) V.
    Batches drawn independently from one distribution are exchangeable, so in expectation over the data it holds for
    any fixed placement, with E[V].
(d) For a drift that is alike in all units up to their weights w_u, those of W: g_ju - gbar_u = sqrt(w_u) E_u x_j with
    linear isometries E_u and sum_j x_j = 0. Let l_i be the load of worker i (sum of w_u over its units), and
    1 + e_i = l_i / mean load. Then for any placement T <= C ((1-rho) (1 + max e_i) + rho mean(e_i^2)) V. For balanced
    loads this is C (1-rho) V, with equality where x is in the eigenspace of lambda_2.

Proof. (a) Let A = M diag(w) M^T with M_iu = 1 if i holds u and 0 if not, and L = diag(l). The row sums of A are p l_i,
so W = L^-1 A / p. It is similar to the positive semidefinite L^-1/2 A L^-1/2 / p, and stochastic, so lambda_1 = 1.
A_ii = l_i makes W_ii = 1/p and the trace k/p, hence k/p - 1 = lambda_2 + ... + lambda_k <= (k-1) lambda_2, with
equality if and only if these are all equal. (If the graph falls apart, lambda_2 = 1 and rho = 0.)

(b) With d_j = g_ju - gbar_u, which sum to zero, ghat_u - gbar_u = sum_j c_j d_j for c_j = [j in H(u)]/p - 1/k. Their
square sum is p (1/p - 1/k)^2 + (k-p)/k^2 = (k-p)/(pk), so by Cauchy and Schwarz |ghat_u - gbar_u|^2 <= (k-p)/(pk) k V_u
= (k-p)/p V_u. Sum over u, times C, and (a). The first step is an equality where d_j is proportional to c_j: each unit's
holders deviate together from the others, the worst placement that there is.

(c) H(u) then holds a uniform sample of p of the k batches without replacement. Its mean has the variance (1/p)(1 - p/k)
times the sample variance V_u k/(k-1), together (k-p) / (p (k-1)) V_u. Sum over u, times C, and (a).

(d) ghat_u - gbar_u = sqrt(w_u) E_u (1/p) sum_i M_iu x_i, so sum_u |ghat_u - gbar_u|^2 = x^T A x / p^2 (summed over the
coordinates of x), and V = sum_u w_u mean|x|^2. Let m = sum_i l_i x_i / sum_i l_i and z_i = x_i - m. From A 1 = p l and
sum_i l_i z_i = 0 follows x^T A x = z^T A z + p |m|^2 sum_i l_i. L^1/2 z is orthogonal to L^1/2 1, the first eigenvector
of the symmetric form, so z^T A z <= p lambda_2 sum_i l_i |z_i|^2 = p lambda_2 (sum_i l_i |x_i|^2 - |m|^2 sum_i l_i).
With sum_i l_i = p sum_u w_u, sum_u |ghat_u - gbar_u|^2 <= sum_u w_u (lambda_2 mean((1+e_i) |x_i|^2) + rho |m|^2), and
m = mean(e_i x_i) makes |m|^2 <= mean(e_i^2) mean|x|^2. So unbalanced loads cost twice: the deviation of heavy workers
counts more, and masked averages gather around the mean weighted by load instead of the plain one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import LossFunction, local_gradients, masked_average

Gradients = Mapping[str, torch.Tensor]


def dense_gradients(
    model: nn.Module, plan: Plan, batches: Sequence[Sequence[Any]], loss_of: LossFunction
) -> list[dict[str, torch.Tensor]]:
    """For each rank the dense model's gradient on that rank's batches, by dense parameter name.

    Args:
        plan: only its ranks and units count.
        batches: per rank its micro-batches.

    Raises:
        ValueError: not one entry of `batches` for each rank of `plan`.
    """
    k = plan.num_subnetworks
    whole = dataclasses.replace(  # data parallelism: everybody holds everything
        plan, regime="backward", num_holders=k, holders=(tuple(range(k)),) * len(plan.units)
    )
    return worker_gradients(model, whole, batches, loss_of)


def worker_gradients(
    model: nn.Module, plan: Plan, batches: Sequence[Sequence[Any]], loss_of: LossFunction
) -> list[dict[str, torch.Tensor]]:
    """For each rank the gradient that `plan` lets it compute on its own batches; zeros for what it lacks.

    Args, raises: as `dense_gradients`.
    """
    _check_ranks(plan, batches, "batches")
    return [local_gradients(model, plan, rank, own, loss_of)[1] for rank, own in enumerate(batches)]


def layer_similarity(
    model: nn.Module, plan: Plan, batches: Sequence[Sequence[Any]], loss_of: LossFunction, layers: Iterable[str]
) -> dict[str, float]:
    """Cosine similarity, layer by layer, of the masked average and the dense gradient averaged over the same batches.

    The figure by which arXiv 2507.09029 (Figure 2) compares regimes and strategies. It runs every worker twice.

    Args:
        plan: regime and who holds what.
        batches: per rank its micro-batches.
        layers: dense names of the layers, such as "model.layers.0"; see `similarity`.

    Returns:
        As `similarity`.
    """
    average = masked_average(model, plan, worker_gradients(model, plan, batches, loss_of))
    return similarity(average, mean(dense_gradients(model, plan, batches, loss_of)), layers)


def similarity(average: Gradients, full: Gradients, layers: Iterable[str]) -> dict[str, float]:
    """Cosine of two gradients for each layer, over all of the layer's parameters, those in no unit included.

    Args:
        average, full: by dense parameter name, the same names in both.
        layers: dense names of modules; a parameter in none of them counts for its own module (embeddings, head).

    Returns:
        In the order of the parameters; 0.0 where one of the two is zero.
    """
    prefixes = sorted(layers, key=len, reverse=True)  # the innermost first
    groups: dict[str, list[str]] = {}
    for name in full:
        layer = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), None)
        groups.setdefault(layer or name.rpartition(".")[0] or name, []).append(name)
    return {layer: _cosine(average, full, names) for layer, names in groups.items()}


def _cosine(a: Gradients, b: Gradients, names: Sequence[str]) -> float:
    inner, a_norm, b_norm = (
        sum(float((x[name].double() * y[name].double()).sum()) for name in names) for x, y in ((a, b), (a, a), (b, b))
    )
    return inner / (a_norm * b_norm) ** 0.5 if a_norm and b_norm else 0.0


def mean(gradients: Sequence[Gradients]) -> dict[str, torch.Tensor]:
    """Plain average over ranks, in fp64."""
    return {name: torch.stack([own[name].double() for own in gradients]).mean(0) for name in gradients[0]}


def deviation(plan: Plan, gradients: Sequence[Gradients]) -> float:
    """V: mean over subnetworks of the squared distance of their gradients from the full average, maskable units only.

    Args:
        gradients: per rank the dense gradient of its batches (`dense_gradients`), also of what it does not hold.

    Raises:
        ValueError: not one gradient for each rank.
    """
    _check_ranks(plan, gradients, "gradients")
    full = mean(gradients)
    own = [
        mean([gradients[rank] for rank, other in enumerate(plan.subnetwork_of_rank) if other == subnetwork])
        for subnetwork in range(plan.num_subnetworks)
    ]
    return sum(_squared_distance(plan, gradient, full) for gradient in own) / plan.num_subnetworks


def distance(plan: Plan, average: Gradients, gradients: Sequence[Gradients]) -> float:
    """T: mean over subnetworks of the squared distance of `average` from the full average, on the units they hold.

    Args:
        average: what the workers apply (`reference.masked_average`).
        gradients: as in `deviation`.
    """
    _check_ranks(plan, gradients, "gradients")
    return plan.coverage * _squared_distance(plan, average, mean(gradients))


def _squared_distance(plan: Plan, a: Gradients, b: Gradients) -> float:
    pieces = [piece for unit in plan.units for piece in unit.pieces if piece.kind == "parameter"]
    return sum(
        float((p.narrow(a[p.parameter]).double() - p.narrow(b[p.parameter]).double()).square().sum()) for p in pieces
    )


@dataclass(frozen=True)
class Permitted:
    """Largest T / V that the proposition permits.

    Args:
        expected: (c), the mean over placements of the batches itself; it does not depend on the assignment.
        always: (b), whatever the gradients and their placement.
        on_average: (c), bound on that mean.
        drift: (d), whatever the placement, when workers deviate alike in all units.
    """

    expected: float
    always: float
    on_average: float
    drift: float


def permitted(plan: Plan, weights: Sequence[int] | None = None) -> Permitted:
    """The bounds of the proposition for the backward regime.

    Args:
        weights: trainable elements of each unit, None for equal units; as in `Plan.spectral_gap`.

    Raises:
        ValueError: the plan is of the forward regime, for which nothing is known.
    """
    if plan.regime != "backward":
        raise ValueError(
            f"regime is {plan.regime!r}: the bound needs the dense model's forward pass; expected a plan "
            'with regime "backward"'
        )
    rho, k, p = plan.spectral_gap(weights), plan.num_subnetworks, plan.num_holders
    expected = (k - p) / (p * (k - 1)) if k > 1 else 0.0
    loads = [sum(weights[u] if weights else 1 for u in plan.units_of(worker)) for worker in range(k)]
    excess = [load * k / sum(loads) - 1 for load in loads]
    unbalanced = (1 - rho) * (1 + max(excess)) + rho * sum(e * e for e in excess) / k
    return Permitted(*(plan.coverage * factor for factor in (expected, (k - 1) * (1 - rho), 1 - rho, unbalanced)))


def _check_ranks(plan: Plan, items: Sequence[Any], what: str) -> None:
    num_ranks = len(plan.subnetwork_of_rank)
    if len(items) != num_ranks:
        raise ValueError(f"{what}: got {len(items)} entries, expected one for each of the plan's {num_ranks} ranks")
