"""A rank's own gradients between backward and the exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.layout.cuts import Location
from sdp_deepspeed.layout.places import PieceViews, Stored
from sdp_deepspeed.units import Piece


class Gradients:
    """Local gradients of what this rank holds: fp32 accumulators where they are kept, else `param.grad`.

    Args:
        parameters: the module's parameters by dense name.
        views: where pieces lie in them, and so in their gradients.
        accumulate_in_fp32: keep fp32 sums of gradients whose parameters are of lower precision.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], views: PieceViews, *, accumulate_in_fp32: bool
    ) -> None:
        self._parameters = parameters
        self._views = views
        self._sums: dict[str, torch.Tensor] = {}
        self._accumulate_in_fp32 = accumulate_in_fp32
        self._hooks: list[RemovableHandle] = []

    def install(self) -> None:
        """From now on gradients of lower precision are added to fp32 sums, if they are to be."""
        for name, parameter in self._parameters.items() if self._accumulate_in_fp32 else ():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._adder(name)))

    def uninstall(self) -> None:
        """Inverse of `install`, where there are no gradients."""
        for hook in self._hooks:
            hook.remove()

    def _adder(self, name: str) -> Callable[[torch.Tensor], None]:
        def add(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if name in self._sums:
                self._sums[name].add_(parameter.grad)
            else:
                self._sums[name] = parameter.grad.float()
            parameter.grad = None

        return add

    def locate(self, piece: Piece) -> Location:
        """A gradient is laid out as its parameter."""
        return self._views.locate(piece)

    def tensor(self, key: Stored) -> torch.Tensor | None:
        """A gradient, in the order in which it travels; None if this rank's loss did not reach the parameter."""
        gradient = self._of(key.parameter)
        return None if gradient is None else key.in_order(gradient)

    def _of(self, name: str) -> torch.Tensor | None:
        return self._sums.get(name, self._parameters[name].grad)

    def tensors(self) -> list[torch.Tensor]:
        """All that exist now."""
        return [gradient for name in self._parameters if (gradient := self._of(name)) is not None]

    def exists(self, name: str) -> bool:
        return self._of(name) is not None

    def free(self, name: str) -> None:
        self._sums.pop(name, None)
        self._parameters[name].grad = None

    def make(self, name: str) -> None:
        """A gradient of zeros if this rank's loss did not reach the parameter."""
        parameter = self._parameters[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
