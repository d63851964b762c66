"""Is a user's description of a layer true? For a test of their own."""

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

_TOLERANCE = 2.0**-12  # of fp32 sums of some thousand terms in another order


def check_description(
    model: nn.Module, batch: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor] | None = None
) -> list[str]:
    """Compare masked models with what the method defines, in all modes that the model's descriptions allow.

    In the forward regime a subnetwork must compute what the dense model with zeroed pieces computes; in the backward
    regime the dense model's loss and gradients. Call it in a test, with a small model in fp32 without dropout, whose
    weights are not zero (zeros hide mistakes).

    Args:
        model: with described layers; it is copied.
        batch: keyword arguments of the model, or its one argument.
        loss_of: from a model and the batch; by default `.loss` of the output, or the mean of its squares.

    Returns:
        The modes that were compared, as "forward x block".

    Raises:
        AssertionError: a description is not true, with the mode and what differs.
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
    """Two workers that hold every second unit of each branch."""
    branches = locate_branches(model)
    units = units_of_branches(branches, strategy=strategy, num_subnetworks=3)
    names = branches_of_units(units, branches)
    holders = tuple((names[:index].count(name) % 2,) for index, name in enumerate(names))
    if len({*holders}) == 1:  # one block only
        raise ValueError("check_description: the model has one unit only; give it two layers")
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
