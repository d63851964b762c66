"""`check_description`: verify a description of an architecture, in a user's test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import Branch, LocatedBranch
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import branches_of_units, units_of_branches
from sdp_deepspeed.plan.tensors import named_tensors
from sdp_deepspeed.units import Piece, Regime

LossOf = Callable[[nn.Module, Any], torch.Tensor]
_TOLERANCE = 2.0**-12  # fp32 sums of some thousand terms in a different order


def check_description(model: nn.Module, batch: Any, loss_of: LossOf | None = None) -> list[str]:
    """Compare masked copies of a model with the definition of the method, in all modes that its descriptions allow.

    In the forward regime a subnetwork must compute the same as the dense model with zeroed pieces, in which what its
    units add is multiplied by 1 / C with `branch_scale`; in the backward regime the loss and gradients of the dense
    model. Call it in a test, with a small fp32 model without dropout. Weights must not be zero, which would hide
    mistakes. The scale of a layer with a norm on the residual stream cannot be compared.

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
    loss_of = loss_of or _loss
    compared = []
    branches = proven_branches(model, "neuron")
    if misfits := [b for b in branches if b.description.inner is not None and b.uncuttable_reason]:
        raise ValueError(f"check_description: {misfits[0].name!r} cannot be cut: {misfits[0].uncuttable_reason}")
    cut = {b.description.name: "neuron" for b in branches if not b.uncuttable_reason}
    strategies = (["block"] if any(b.is_bypassed for b in branches) else []) + ([cut] if cut else [])
    _check_outputs(model, branches, batch, loss_of)
    for regime in ("forward", "backward"):
        for strategy in strategies:
            mode = f"{regime} x {'block' if strategy == 'block' else 'neuron'}"
            plan = _plan(model, regime, strategy)
            for rank in (0, 1):
                _compare(model, plan, rank, batch, loss_of, mode)
            compared.append(mode)
    if "block" in strategies and _adds_branches(model, branches, batch, loss_of):
        for kind in dict.fromkeys(branch.description.name for branch in branches if branch.is_bypassed):
            _compare_scale(model, branches, kind, batch, loss_of)
    return compared


def _check_outputs(model: nn.Module, branches: Sequence[LocatedBranch], batch: Any, loss_of: LossOf) -> None:
    """Compare what the modules of branches return with what an absent branch returns there. A tensor would unpack into
    a tuple if the batch has as many rows."""
    model = deepcopy(model)
    problems: list[str] = []

    def compare(branch: Branch, name: str, num_outputs: int, output: Any) -> None:
        number = len(output) if isinstance(output, tuple) else 1
        is_tuple, first = isinstance(output, tuple), output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, torch.Tensor) and is_tuple == (num_outputs > 1) and number <= max(num_outputs, 1):
            return
        got = f"a tuple of {number}" if is_tuple else _describe(output)
        wanted = f"a tuple of {num_outputs}, a tensor first" if num_outputs > 1 else "a tensor"
        right = max(number, 2) if is_tuple else 1
        remedy = f"; set num_outputs={right} in Branch({branch.name!r})" if num_outputs else ""
        problems.append(f"{name!r} returns {got}, expected {wanted}{remedy}")

    for branch in (branch for branch in branches if branch.is_bypassed and not branch.is_derived):
        for name in branch.modules:
            num_outputs = branch.description.num_outputs if name == branch.bodies[0] else 0
            check = partial(compare, branch.description, name, num_outputs)
            model.get_submodule(name).register_forward_hook(lambda _, __, output, check=check: check(output))
    loss_of(model, batch)
    assert not problems, f"block: {problems[0]}"


def _plan(model: nn.Module, regime: Regime, strategy: Any) -> Plan:
    """A plan of two subnetworks, each with every second unit of each branch."""
    branches = proven_branches(model, "neuron")
    units = units_of_branches(branches, strategy=strategy, num_subnetworks=3)
    names = branches_of_units(units, branches)
    holders = tuple((names[:index].count(name) % 2,) for index, name in enumerate(names))
    if len({*holders}) == 1 and isinstance(strategy, str):  # a single block
        raise ValueError("check_description: the model has one unit only; use two layers")
    return Plan(regime, strategy, 2, 0, tuple(units), holders, (0, 1))


def _adds_branches(model: nn.Module, branches: Sequence[LocatedBranch], batch: Any, loss_of: LossOf) -> bool:
    """Whether layers return any input as it is where their blocks are zero, so that their outputs show the scale."""
    without = deepcopy(model)
    _zero(without, [piece for branch in branches for piece in branch.pieces])
    unchanged: list[bool] = []

    def give(_: nn.Module, args: Any, kwargs: Any) -> Any:
        position, stream = _stream(args, kwargs)
        given = torch.randn_like(stream)  # of both signs, unlike what is behind a ReLU
        args = tuple(given if index == position else value for index, value in enumerate(args))
        return args, {name: given if name == position else value for name, value in kwargs.items()}

    def compare(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        unchanged.append(torch.equal(_first(output), _stream(args, kwargs)[1]))

    for layer in {branch.layer for branch in branches if branch.is_bypassed}:
        module = without.get_submodule(layer)
        module.register_forward_pre_hook(give, with_kwargs=True)
        module.register_forward_hook(compare, with_kwargs=True)
    loss_of(without, batch)
    return all(unchanged)


def _compare_scale(model: nn.Module, branches: Sequence[LocatedBranch], kind: str, batch: Any, loss_of: LossOf) -> None:
    """Compare subnetworks in which each layer has one block with x + (layer(x) - x) / C. Neurons need no such check:
    they are multiplied at a described layer."""
    layers = [branch.layer for branch in branches if branch.description.name == kind]
    if len({*layers}) < max(len(layers), 2):
        return  # several such blocks of a layer, or a single one
    model = deepcopy(model)
    _zero(model, [piece for branch in branches if branch.description.name != kind for piece in branch.pieces])
    plan = _plan(model, "forward", {kind: "block"})

    def scaled(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        stream = _stream(args, kwargs)[1]
        result = stream + (_first(output) - stream) * plan.num_subnetworks
        return (result, *output[1:]) if isinstance(output, tuple) else result

    for rank in (0, 1):
        expected = deepcopy(model)
        for layer in layers:
            expected.get_submodule(layer).register_forward_hook(scaled, with_kwargs=True)
        _compare(model, plan, rank, batch, loss_of, "branch_scale, forward x block", expected)


def _stream(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | str, torch.Tensor]:
    """The first tensor that a layer is given, with its position or name."""
    values: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return next((place, value) for place, value in values if isinstance(value, torch.Tensor))


def _first(output: Any) -> Any:
    """The only output of a layer, or the first of several."""
    return output[0] if isinstance(output, tuple) else output


def _zero(model: nn.Module, pieces: Iterable[Piece]) -> None:
    tensors = named_tensors(model)
    for piece in pieces:
        piece.narrow(tensors[piece.parameter].detach()).zero_()


def _compare(
    model: nn.Module,
    plan: Plan,
    rank: int,
    batch: Any,
    loss_of: LossOf,
    mode: str,
    scaled_model: nn.Module | None = None,
) -> None:
    """
    Args:
        scaled_model: the dense model that scales its branches, with `branch_scale`; None without.
    """
    expected_model = scaled_model or deepcopy(model)
    masked_model = deepcopy(model)
    if plan.regime == "forward":
        absent = [unit for index, unit in enumerate(plan.units) if not plan.holds(index, rank)]
        _zero(expected_model, [piece for unit in absent for piece in unit.pieces])
    branches = proven_branches(masked_model, plan.strategy)
    mask = Mask(masked_model, plan, rank, branches, is_scaled=scaled_model is not None)
    mask.apply()
    expected = _backward(loss_of(expected_model, batch))
    try:
        loss = _backward(loss_of(masked_model, batch))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise AssertionError(f"{mode}: subnetwork {rank} does not run, unlike the dense model: {error}") from error
    assert torch.allclose(loss, expected, rtol=_TOLERANCE), (
        f"{mode}: the loss of subnetwork {rank} is {loss.item():.6g}, expected {expected.item():.6g}; some branch is "
        "not x + after(body(norm(x))) as described (branch_scale: a norm is not named), or (neuron) `scaled` lacks an "
        "attribute with the number of heads"
    )
    gradients: Mapping[str, torch.Tensor | None] = {n: p.grad for n, p in expected_model.named_parameters()}
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, pieces in mask.pieces.items():
        gradient, of_rank = gradients[name], mask.parameters[name].grad
        for piece, holders in pieces:
            if scaled_model is not None and len(holders) > 1:
                continue  # of a branch that is zero here; the layer's output has its gradient times C
            if mask.is_trained(piece) and gradient is not None:
                value = torch.zeros_like(piece.narrow(gradient)) if of_rank is None else mask.view(piece, of_rank)
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
