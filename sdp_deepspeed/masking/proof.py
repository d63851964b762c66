"""Proof by numbers that derived branches may be absent.

The oracle needs no names: a layer in which a branch is absent computes the same as the layer in which all parameters of
that branch are zero, and so do its gradients. Each form of a layer runs once by itself in training mode, in fp32 on the
CPU, with random weights and the inputs that it had in the traced pass; inputs that depend on weights are random.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sdp_deepspeed.architectures import LocatedBranch, locate_branches
from sdp_deepspeed.architectures.derivation import Derivation, derivation_of
from sdp_deepspeed.architectures.streams import Layer, layer_of
from sdp_deepspeed.architectures.trace import Node, map_tensors, tensors_in
from sdp_deepspeed.masking.absent_blocks import skip_branch

_LARGE = 2**22  # elements of weights that are not stored, but overlap in memory
_TOLERANCE = 1e-4  # of fp32 sums of thousands of terms
_LAYER = "layer"

_PROVEN: WeakKeyDictionary[nn.Module, tuple[Derivation, dict[str, str]]] = WeakKeyDictionary()


def proven_branches(model: nn.Module) -> list[LocatedBranch]:
    """The residual branches of a model that masking may leave out.

    Described branches are taken as they are (`check_description`); derived ones are proven here, once for a model.

    Args:
        model: whole, on any device, including meta.

    Raises:
        ValueError: see `locate_branches`; or no derived branch could be proven.
    """
    branches = locate_branches(model)
    if not any(branch.is_derived for branch in branches):
        return branches
    derivation = derivation_of(model)
    known = _PROVEN.get(model)
    if known is None or known[0] is not derivation:
        with _disable_current_modes(), torch.device("cpu"):
            known = _PROVEN[model] = derivation, _failures(model, branches)
    failures = known[1]
    proven = [branch for branch in branches if branch.layer not in failures]
    if not proven:
        layer, reason = next(iter(failures.items()))
        raise ValueError(f"{type(model).__name__}: no residual branch can be left out: {layer!r}: {reason}")
    return proven


def replicated_layers(model: nn.Module) -> list[str]:
    """A warning about layers that all ranks hold, in whole or in part, because a branch was not derived or proven; none
    without such layers.

    Args:
        model: whose branches are known from `proven_branches`.
    """
    if model not in _PROVEN:
        return []
    derivation, failures = _PROVEN[model]
    reasons = {**derivation.reasons, **failures}
    if not reasons:
        return []
    layer, reason = next(iter(reasons.items()))
    return [f"{len(reasons)} layers are replicated, in whole or in part, such as {layer!r}: {reason}"]


def _failures(model: nn.Module, branches: Sequence[LocatedBranch]) -> dict[str, str]:
    """Reasons why layers are not proven, by dense name."""
    passes = derivation_of(model).passes
    of_forms: dict[Any, str] = {}
    failures: dict[str, str] = {}
    for name in dict.fromkeys(branch.layer for branch in branches):
        of_layer = [branch for branch in branches if branch.layer == name]
        traced, prefix = passes[name]
        layer = layer_of(traced.model, traced, name.removeprefix(prefix))
        assert layer is not None
        form = _form(layer.module, of_layer)
        if form not in of_forms:
            of_forms[form] = _failure(layer, of_layer)
        if of_forms[form]:
            failures[name] = of_forms[form]
    return failures


def _form(layer: nn.Module, branches: Sequence[LocatedBranch]) -> Any:
    modules = tuple((name, type(module)) for name, module in layer.named_modules())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return modules, shapes, tuple(branch.description for branch in branches)


def _failure(layer: Layer, branches: Sequence[LocatedBranch]) -> str:
    """Why a layer's branches are not proven; empty if they are."""
    own = [
        replace(
            branch,
            layer=_LAYER,
            pieces=tuple(
                replace(piece, parameter=f"{_LAYER}.{piece.parameter.removeprefix(branch.layer + '.')}")
                for piece in branch.pieces
            ),
        )
        for branch in branches
    ]
    try:
        values = _Values()
        holder = nn.ModuleDict({_LAYER: values.of_module(layer.module)}).train()
        inputs = values.of((layer.call.args, layer.call.kwargs))
        ends = _index(layer.call.inputs, layer.stream[-1]), _index(layer.call.outputs, layer.stream[0])
        dense = _run(holder, inputs, ends)
        absent_sets = [[branch] for branch in own] + ([own] if len(own) > 1 else [])
        for absent in absent_sets:
            names = ", ".join(branch.description.name for branch in absent)
            masked = _run(_without(holder, absent), inputs, ends)
            expected = _run(_zeroed(holder, absent), inputs, ends)
            if difference := _difference(masked, expected):
                return f"without {names} it differs from the layer with zero parameters there: {difference}"
            if not _difference(masked, dense):
                return f"without {names} it computes the same on the example, so nothing is proven"
    except Exception as error:  # of user code that runs alone
        return f"it could not be run alone, so nothing is proven ({type(error).__name__}: {_first_line(error)})"
    return ""


def _index(tensors: Sequence[tuple[Any, ...]], node: Node) -> int:
    """Index of the stream's tensor among those of a call."""
    return next(index for index, (*_, made) in enumerate(tensors) if made is node)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


class _Values:
    """Numbers in place of fake tensors, each tensor's the same wherever it occurs."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._known: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        return map_tensors(self._of_tensor, value)

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._known:
            if not isinstance(tensor, FakeTensor):
                number = tensor.detach().clone()
            elif tensor.is_floating_point():
                number = torch.randn(tensor.shape, generator=self._generator)
            else:
                number = torch.ones(tensor.shape, dtype=tensor.dtype) * (tensor.dtype == torch.bool)
            self._known[id(tensor)] = number.float() if number.is_floating_point() else number
        return self._known[id(tensor)]

    def of_module(self, module: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(self._weight(parameter), requires_grad=True)
        for buffer in module.buffers():
            memo[id(buffer)] = self._of_tensor(buffer).abs() if isinstance(buffer, FakeTensor) else self.of(buffer)
        return copy.deepcopy(module, memo)

    def _weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """Random weights; those of a large matrix overlap in memory, as its rows are shifted by one."""
        if parameter.dim() < 2:
            return 0.5 + 0.2 * torch.randn(parameter.shape, generator=self._generator)
        scale = (parameter.shape[0] / max(1, parameter.numel())) ** (0.25 if parameter.dim() == 3 else 0.5)
        if parameter.numel() <= _LARGE:
            return scale * torch.randn(parameter.shape, generator=self._generator)
        values = scale * torch.randn(sum(parameter.shape), generator=self._generator)
        return values.as_strided(parameter.shape, (1,) * parameter.dim())


def _copy(holder: nn.Module) -> nn.Module:
    """A copy with its own Parameters and buffers; weights are the same memory."""
    return copy.deepcopy(holder, {id(p): nn.Parameter(p.data) for p in holder.parameters()})


def _without(holder: nn.Module, branches: Sequence[LocatedBranch]) -> nn.Module:
    """A copy of the layer without branches, as the mask makes it."""
    masked = _copy(holder)
    for branch in branches:
        list(skip_branch(masked, branch))
        inside = {piece.parameter for piece in branch.pieces}
        own = set(branch.parameters)
        for name, parameter in masked.named_parameters():
            if name in inside:
                parameter.data = torch.zeros(parameter.shape if name in own else 0)
                parameter.requires_grad_(False)
    return masked


def _zeroed(holder: nn.Module, branches: Sequence[LocatedBranch]) -> nn.Module:
    """A copy of the layer in which all parameters of branches are zero."""
    zeroed = _copy(holder)
    inside = {piece.parameter for branch in branches for piece in branch.pieces}
    for name, parameter in zeroed.named_parameters():
        if name in inside:
            parameter.data = torch.zeros(parameter.shape)
            parameter.requires_grad_(False)
    return zeroed


class _SameRandomNumbers(TorchDispatchMode):
    """Each random operation draws the same numbers, however many were drawn before."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """The product of experts, also of weights that overlap in memory."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    ranges = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if b.dim() == 2:
        return torch.stack([a[:, rows] @ b[rows] for rows in ranges])
    products = [a[rows] @ matrix for rows, matrix in zip(ranges, b, strict=True)]
    return torch.cat([*products, a.new_zeros(len(a) - ends[-1], b.shape[-1])])


def _run(holder: nn.Module, inputs: Any, ends: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A layer's output and gradients, by name.

    Args:
        ends: indices of the stream among the layer's input and output tensors.
    """
    layer: Callable[..., Any] = holder.get_submodule(_LAYER)
    original = tensors_in(inputs)[ends[0]]
    given = original.clone().requires_grad_()
    small = {n: p for n, p in holder.named_parameters() if p.requires_grad and p.numel() <= _LARGE}
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _SameRandomNumbers():
        random.seed(0)
        stream = given * 1  # may be changed in place
        args, kwargs = map_tensors(lambda tensor: stream if tensor is original else tensor.clone(), inputs)
        output = tensors_in(layer(*args, **kwargs))[ends[1]]
        wave = torch.linspace(-1, 1, output.numel()).sin().reshape(output.shape)
        gradients = torch.autograd.grad((output * wave).sum(), [given, *small.values()], allow_unused=True)
    named = dict(zip(("its input", *small), gradients, strict=True))
    of_names = {f"the gradient of {name}": gradient for name, gradient in named.items() if gradient is not None}
    return {"its output": output.detach(), **of_names}


def _difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> str:
    """Where two results differ, and by how much; empty if they are equal."""
    for name in first.keys() & second.keys():
        largest = max(1.0, float(second[name].abs().max()))
        off = (
            float((first[name] - second[name]).abs().max()) if first[name].shape == second[name].shape else float("nan")
        )
        if not off <= _TOLERANCE * largest:
            return f"{name} by {off:.2g} of {largest:.2g}"
    return ""
