"""`check_description`: verify a description of an architecture, in a user's test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
        loss_of: computes the loss of a model and the batch. Default: the output's `loss`, its only scalar (a model that
            returns a tuple of logits and loss), or for a tensor the mean of its squares.

    Returns:
        The compared modes, such as "forward x block".

    Raises:
        AssertionError: a description is wrong; the message has the mode and the difference.
        ValueError: no layer is described, its neurons or heads do not fit, or the model has no loss with a gradient.
    """
    loss_of, compared = loss_of or _loss, []
    branches = locate_branches(model)
    if misfits := [b for b in branches if b.description.inner is not None and b.uncuttable_reason]:
        raise ValueError(f"check_description: {misfits[0].name!r} cannot be cut: {misfits[0].uncuttable_reason}")
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
    expected = _backward(loss_of(expected_model, batch))
    try:
        found = _backward(loss_of(masked_model, batch))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise AssertionError(f"{mode}: subnetwork {rank} does not run, unlike the dense model: {error}") from error
    assert torch.allclose(found, expected, rtol=_TOLERANCE), (
        f"{mode}: the loss of subnetwork {rank} is {found.item():.6g}, expected {expected.item():.6g}; some branch is "
        "not x + after(body(norm(x))) as described, or (neuron) `scaled` lacks an attribute with the number of heads"
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


def _backward(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        raise ValueError(
            "check_description: expected a scalar loss with a gradient; pass labels in the batch, or "
            f"`loss_of(model, batch)`; got {_describe(loss)}"
        )
    loss.backward()
    return loss


def _describe(value: Any) -> str:
    return f"a tensor of shape {[*value.shape]}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _loss(model: nn.Module, batch: Any) -> Any:
    output: Any = model(**batch) if isinstance(batch, Mapping) else model(batch)
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    if (loss := output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)) is not None:
        return loss
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, Iterable) else ()
    scalars = [value for value in values if isinstance(value, torch.Tensor) and value.dim() == 0]
    return scalars[0] if len(scalars) == 1 else output
