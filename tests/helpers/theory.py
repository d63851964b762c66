"""Error of the masked average, measured: bias, distance from the full average, similarity layer by layer.

`permitted` computes the bounds of the proposition in docs/theory.md, which has its notation and proof.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import LossFunction, local_gradients
from sdp_deepspeed.units import Unit

Gradients = Mapping[str, torch.Tensor]


def dense_gradients(
    model: nn.Module, plan: Plan, batches: Sequence[Sequence[Any]], loss_of: LossFunction
) -> list[dict[str, torch.Tensor]]:
    """The dense model's gradient on each rank's batches, by dense parameter name.

    Args:
        plan: only its ranks and units are used.
        batches: micro-batches of each rank.

    Raises:
        ValueError: the number of entries of `batches` is not the number of ranks.
    """
    k = plan.num_subnetworks
    whole = dataclasses.replace(  # data parallelism: every rank holds everything
        plan, regime="backward", num_holders=k, holders=(tuple(range(k)),) * len(plan.units)
    )
    return worker_gradients(model, whole, batches, loss_of)


def worker_gradients(
    model: nn.Module, plan: Plan, batches: Sequence[Sequence[Any]], loss_of: LossFunction
) -> list[dict[str, torch.Tensor]]:
    """The gradient that each rank computes under `plan` on its own batches; zeros for pieces that it lacks.

    Arguments and errors are those of `dense_gradients`.
    """
    _check_ranks(plan, batches, "batches")
    return [local_gradients(model, plan, rank, own, loss_of)[1] for rank, own in enumerate(batches)]


def similarity(average: Gradients, full: Gradients, layers: Iterable[str]) -> dict[str, float]:
    """Cosine similarity of two gradients for each layer, over all of its parameters, including shared ones.

    arXiv 2507.09029 (Figure 2) compares regimes and strategies by this similarity of the masked average and the dense
    gradient over the same batches.

    Args:
        average, full: gradients by dense parameter name, with the same names.
        layers: dense names of modules; parameters outside count for their own module (embeddings, head).

    Returns:
        Similarities in the order of the parameters; 0.0 if one gradient is zero.
    """
    prefixes = sorted(layers, key=len, reverse=True)  # innermost first
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
    """V: mean over subnetworks of the squared distance of their gradients from the full average, for units.

    Args:
        gradients: dense gradient of each rank's batches (`dense_gradients`), including units that the rank lacks.

    Raises:
        ValueError: the number of gradients is not the number of ranks.
    """
    _check_ranks(plan, gradients, "gradients")
    full = mean(gradients)
    own = [
        mean([gradients[rank] for rank, other in enumerate(plan.subnetwork_of_rank) if other == subnetwork])
        for subnetwork in range(plan.num_subnetworks)
    ]
    return sum(_squared_distance(unit, one, full) for one in own for unit in plan.units) / plan.num_subnetworks


def distance(plan: Plan, average: Gradients, gradients: Sequence[Gradients]) -> float:
    """T: mean over subnetworks of the squared distance of `average` from the full average, on the units they hold.

    Args:
        average: the masked average (`virtual_workers.masked_average`).
        gradients: see `deviation`.
    """
    _check_ranks(plan, gradients, "gradients")
    full = mean(gradients)
    return sum(plan.coverage_of(u) * _squared_distance(unit, average, full) for u, unit in enumerate(plan.units))


def _squared_distance(unit: Unit, a: Gradients, b: Gradients) -> float:
    pieces = [piece for piece in unit.pieces if piece.kind == "parameter"]
    return sum(
        float((p.narrow(a[p.parameter]).double() - p.narrow(b[p.parameter]).double()).square().sum()) for p in pieces
    )


@dataclass(frozen=True)
class Permitted:
    """Bounds of T / V in the proposition.

    Args:
        expected: (c), the exact mean over placements of batches, independent of the assignment.
        always: (b), for any gradients and placement.
        on_average: (c), the bound on that mean.
        drift: (d), for any placement, if workers deviate equally in all units.
    """

    expected: float
    always: float
    on_average: float
    drift: float


def permitted(plan: Plan, weights: Sequence[int] | None = None) -> Permitted:
    """The bounds of the proposition for the backward regime.

    Args:
        weights: trainable elements of each unit; None for equal units. See `Plan.spectral_gap`.

    Raises:
        ValueError: the plan is of the forward regime, or its units have different numbers of holders.
    """
    if plan.regime != "backward":
        raise ValueError(
            f'regime: got {plan.regime!r}, expected "backward": the bound assumes the forward pass of the dense model'
        )
    rho, k, p = plan.spectral_gap(weights), plan.num_subnetworks, plan.num_holders
    if p is None:
        raise ValueError("units have different numbers of holders, for which no bound is known")
    expected = (k - p) / (p * (k - 1)) if k > 1 else 0.0
    loads = [sum(weights[u] if weights else 1 for u in plan.units_of(worker)) for worker in range(k)]
    excess = [load * k / sum(loads) - 1 for load in loads]
    unbalanced = (1 - rho) * (1 + max(excess)) + rho * sum(e * e for e in excess) / k
    return Permitted(*(plan.coverage * factor for factor in (expected, (k - 1) * (1 - rho), 1 - rho, unbalanced)))


def _check_ranks(plan: Plan, items: Sequence[Any], what: str) -> None:
    num_ranks = len(plan.subnetwork_of_rank)
    if len(items) != num_ranks:
        raise ValueError(f"{what}: got {len(items)} entries, expected one for each of the plan's {num_ranks} ranks")
