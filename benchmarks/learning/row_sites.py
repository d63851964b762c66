"""Modules that run differently for some rows of a batch: those of a branch on the rows of the workers that hold it; the
output projection of neurons or heads on inputs that are multiplied by a 0/1 mask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

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
class MaskedInput:
    """An output projection whose inputs are multiplied by 0 from absent neurons, and by a factor from held ones."""

    module: nn.Module
    held: torch.Tensor

    def install(self, stack: ExitStack) -> None:
        stack.callback(self.module.register_forward_pre_hook(self._mask).remove)

    def _mask(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0] * self.held, *args[1:])
