"""A rank's own gradients between backward and the exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Gradients(Mapping[str, torch.Tensor | None]):
    """Local gradients by dense name: fp32 accumulators where they are kept, else `param.grad`."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, accumulate_in_fp32: bool) -> None:
        self._parameters = parameters
        self._sums: dict[str, torch.Tensor] = {}
        if accumulate_in_fp32:
            for name, parameter in parameters.items():
                if parameter.requires_grad and parameter.dtype != torch.float32:
                    parameter.register_post_accumulate_grad_hook(self._adder(name))

    def _adder(self, name: str) -> Any:
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if name in self._sums:
                self._sums[name].add_(parameter.grad)
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

        return add

    def __getitem__(self, name: str) -> torch.Tensor | None:
        return self._sums.get(name, self._parameters[name].grad)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def tensors(self) -> list[torch.Tensor]:
        """All that exist now."""
        return [gradient for name in self if (gradient := self[name]) is not None]

    def free(self, name: str) -> None:
        self._sums.pop(name, None)
        self._parameters[name].grad = None

    def existing(self, name: str) -> torch.Tensor:
        """The gradient, made of zeros if this rank's loss did not reach the parameter."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad
