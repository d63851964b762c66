"""`check_description`: verify a description of an architecture, in a user's test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import branches_of_units, locate_branches, units_of_branches
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import named_tensors

_TOLERANCE = 2.0**-12  # fp32 sums of some thousand terms in a different order


def check_description(
    model: nn.Module, batch: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None
) -> list[str]:
    """Compare masked copies of a model with the definition of the method, in all modes that its descriptions allow.

    In the forward regime a subnetwork must compute the same as the dense model with zeroed pieces; in the backward
    regime the loss and gradients of the dense model. Call it in a test, with a small fp32 model without dropout.
    Weights must not be zero, which would hide mistakes.

    Args:
        model: model with described layers; it is copied.
        batch: keyword arguments of the model, or its single argument.
        loss_of: computes the loss of a model and the batch. Default: `.loss` of the output, or the mean of its squares.

    Returns:
        The compared modes, such as "forward x block".

    Raises:
        AssertionError: a description is wrong; the message has the mode and the difference.
    """
    loss_of, compared = loss_of or _loss, []
    branches = locate_branches(model)
    cut = {b.description.name: "neuron" for b in branches if not b.uncuttable_reason}
    strategies = (["block"] if any(b.is_bypassed for b in branches) else []) + ([cut] if cut else [])
    for regime in ("forward", "backward"):
        for strategy in strategies:
            mode = f"{regime} x {'block' if strategy == 'block' else 'neuron'}"
            plan = _plan(model, regime, strategy)
            for rank in (0, 1):
                _compare(model, plan, rank, batch, loss_of, mode)
            compared.append(mode)
    return compared


def _plan(model: nn.Module, regime: str, strategy: Any) -> Plan:
    """A plan of two subnetworks, each with every second unit of each branch."""
    branches = locate_branches(model)
    units = units_of_branches(branches, strategy=strategy, num_subnetworks=3)
    names = branches_of_units(units, branches)
    holders = tuple((names[:index].count(name) % 2,) for index, name in enumerate(names))
    if len({*holders}) == 1:  # a single block
        raise ValueError("check_description: the model has one unit only; use two layers")
    return Plan(regime, strategy, 2, 1, 0, tuple(units), holders, (0, 1))


def _compare(
    model: nn.Module, plan: Plan, rank: int, batch: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor], mode: str
) -> None:
    expected_model, masked_model = deepcopy(model), deepcopy(model)
    if plan.regime == "forward":
        tensors = named_tensors(expected_model)
        for index, unit in enumerate(plan.units):
            for piece in unit.pieces if not plan.holds(index, rank) else ():
                piece.narrow(tensors[piece.parameter].data).zero_()
    mask = Mask(masked_model, plan, rank)
    mask.apply()
    losses = []
    for one in (expected_model, masked_model):
        losses.append(loss_of(one, batch))
        losses[-1].backward()
    expected, found = losses
    assert torch.allclose(found, expected, rtol=_TOLERANCE), (
        f"{mode}: the loss of subnetwork {rank} is {found.item():.6g}, expected {expected.item():.6g}; some branch is "
        "not x + after(body(norm(x))) as described"
    )
    gradients: Mapping[str, torch.Tensor | None] = {n: p.grad for n, p in expected_model.named_parameters()}
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, pieces in mask.pieces.items():
        gradient, own = gradients[name], mask.parameters[name].grad
        for piece, _ in pieces:
            if mask.trained(piece) and gradient is not None:
                value = torch.zeros_like(piece.narrow(gradient)) if own is None else mask.view(piece, own)
                assert torch.allclose(value, piece.narrow(gradient), rtol=_TOLERANCE, atol=_TOLERANCE * largest), (
                    f"{mode}: the gradient of {name!r} in subnetwork {rank} is wrong; see the description of its branch"
                )


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    output: Any = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss: torch.Tensor = output.loss if hasattr(output, "loss") else output.square().mean()
    return loss
