"""What the caller gave to be optimized, read while every rank has the whole model.

Units that a rank lacks have no storage and need no gradients once the plan is applied. Who filters parameters by that,
or sorts them by shape, must do it before: `filter(lambda p: p.requires_grad, model.parameters())` is lazy, and
DeepSpeed calls optimizers that are functions late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Given:
    """Arguments of `deepspeed.initialize`.

    Args:
        parameters: parameters, or param groups, in lists; None if nothing was given.
        optimizer: an optimizer, a function that makes one from `parameters`, or None for one that the config names.
    """

    parameters: list[Any] | None
    optimizer: Any

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Given:
        """Read what was given lazily, before DeepSpeed or anybody else changes the model.

        Args:
            options: of the engine's constructor.
        """
        parameters = options.get("model_parameters")
        if parameters is not None:
            parameters = [_with_list(group) for group in parameters]
        return cls(parameters, options.get("optimizer"))

    def built(self, model: nn.Module) -> Given:
        """With the optimizer that a function makes of the whole model, as DeepSpeed has cast and moved it."""
        if self.optimizer is None or isinstance(self.optimizer, torch.optim.Optimizer):
            return self
        parameters = list(model.parameters()) if self.parameters is None else self.parameters
        optimizer = self.optimizer(parameters)
        return replace(self, optimizer=lambda _: optimizer)


def _with_list(group: Any) -> Any:
    """A param group whose parameters may be read again; a parameter as it is."""
    if isinstance(group, dict) and isinstance(group.get("params"), Iterator):
        return {**group, "params": list(group["params"])}
    return group
