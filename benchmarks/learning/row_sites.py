"""Modules that run differently for some rows of a batch.

Forward x block: the modules of a branch run on the rows of the workers that hold it. Backward x block: they run on all
rows, but only the rows of holders contribute to gradients of the weights. Neurons or heads: the input of the output
projection (forward), or the factors of weight gradients (backward), are multiplied by a 0/1 mask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.absent_blocks import skip_branch
from sdp_deepspeed.masking.forwards import restore_forward


class Site(Protocol):
    """A place of the model that runs differently for some rows."""

    def install(self, stack: ExitStack) -> None:
        """Install it until the stack is closed."""


@dataclass(frozen=True)
class Rows:
    """Rows by whether their worker holds a branch.

    Args:
        held, absent: indices of the rows.
    """

    held: torch.Tensor
    absent: torch.Tensor

    @property
    def count(self) -> int:
        return len(self.held) + len(self.absent)

    def of(self, value: Any, rows: torch.Tensor) -> Any:
        """Select rows of tensors, or of tuples of tensors; other values are unchanged."""
        return _mapped(value, lambda tensor: tensor[rows] if tensor.dim() > 1 and len(tensor) == self.count else tensor)

    def scattered(self, value: Any, scale: float = 1.0) -> Any:
        """Scatter held rows times `scale`, with zeros in the absent rows."""

        def of_tensor(tensor: torch.Tensor) -> torch.Tensor:
            scaled = tensor if scale == 1 else tensor * scale
            return scaled.new_zeros(self.count, *tensor.shape[1:]).index_copy(0, self.held, scaled)

        return _mapped(value, of_tensor)

    def merged(self, held: Any, absent: Any) -> Any:
        """Merge the results of held and absent rows."""
        if isinstance(held, torch.Tensor):
            order = torch.cat([self.held, self.absent]).argsort()
            return torch.cat([held, absent])[order]
        if isinstance(held, tuple):
            return tuple(self.merged(*pair) for pair in zip(held, absent, strict=True))
        return held


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    return value


@dataclass(frozen=True)
class SkippedRows:
    """A branch that runs on the held rows, and adds zeros to the others.

    Args:
        modules: of the branch, in forward order; each gets the output of the previous one.
        scale: factor of what the branch adds.
    """

    modules: tuple[nn.Module, ...]
    rows: Rows
    scale: float = 1.0

    def install(self, stack: ExitStack) -> None:
        for module in self.modules:
            stack.callback(module.register_forward_pre_hook(self._select, with_kwargs=True).remove)
        stack.callback(self.modules[-1].register_forward_hook(self._scatter).remove)

    def _select(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.rows.of(args, self.rows.held), self.rows.of(kwargs, self.rows.held)

    def _scatter(self, _: nn.Module, __: Any, output: Any) -> Any:
        return self.rows.scattered(output, self.scale)


@dataclass(frozen=True)
class AbsentBranch:
    """A branch that runs for no row: as a worker that lacks it runs."""

    model: nn.Module
    branch: LocatedBranch

    def install(self, stack: ExitStack) -> None:
        for module in skip_branch(self.model, self.branch):
            stack.callback(restore_forward, module)


@dataclass(frozen=True)
class _Replaced:
    """A module with a temporarily replaced forward."""

    module: nn.Module

    def install(self, stack: ExitStack) -> None:
        self.module.forward = self.forward
        stack.callback(self.module.__dict__.pop, "forward")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class FrozenRows(_Replaced):
    """A module whose weights get gradients from the held rows only. It has no key/value cache, which would store each
    position twice."""

    rows: Rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        frozen = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        kwargs = {name: None if name == "past_key_values" else value for name, value in kwargs.items()}
        del self.module.forward  # until both parts have run
        try:
            outputs = [
                functional_call(self.module, weights, self.rows.of(args, rows), self.rows.of(kwargs, rows))
                for weights, rows in (({}, self.rows.held), (frozen, self.rows.absent))
                if len(rows)
            ]
        finally:
            self.module.forward = self.forward
        return self.rows.merged(*outputs) if len(outputs) == 2 else outputs[0]


@dataclass(frozen=True)
class MaskedInput:
    """An output projection whose inputs are multiplied by 0 from absent neurons, and by a factor from held ones."""

    module: nn.Module
    held: torch.Tensor

    def install(self, stack: ExitStack) -> None:
        stack.callback(self.module.register_forward_pre_hook(self._mask).remove)

    def _mask(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] * self.held, *args[1:])


@dataclass(frozen=True)
class MaskedGradient(_Replaced):
    """A linear layer whose weights get gradients of held neurons only, for each row.

    Args:
        held: 0/1 mask, [rows, 1, neurons].
        of_inputs: whether the neurons are the layer's inputs, not its outputs.
    """

    held: torch.Tensor
    of_inputs: bool

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        stored = self.module.get_parameter("weight")
        weight = stored if isinstance(self.module, nn.Linear) else stored.t()
        masks = (self.held, None) if self.of_inputs else (None, self.held)
        output: torch.Tensor = _Linear.apply(args[0], weight, self.module.bias, *masks)
        return output


class _Linear(torch.autograd.Function):
    """`x W^T + b` with a mask on the factors of the gradients of W and b: the inputs, or the output's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, inputs: Any, outputs: Any) -> Any:
        ctx.save_for_backward(x, weight, inputs, outputs)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight, inputs, outputs) = gradients, ctx.saved_tensors
        dtype = gradient.dtype  # differs from the saved dtype under autocast
        kept = gradient if outputs is None else gradient * outputs.to(dtype)
        x = (x if inputs is None else x * inputs).to(dtype)
        of_weight = kept.flatten(0, -2).t() @ x.flatten(0, -2)
        of_bias = kept.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight.to(dtype), of_weight, of_bias, None, None
