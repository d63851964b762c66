"""The dense model in the modules of a team's subnetwork, for any host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.checkpoint.random_state import unchanged_random_state
from sdp_deepspeed.init import DeferredWeights
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.teams.shares import averaged_buffers

_NONE: Any = object()  # an attribute that a module does not have


class DenseModules:
    """Shows the dense model in the modules of the subnetwork.

    What masking and hosts change are attributes of modules: `forward`, sizes, and the dicts of parameters, buffers,
    submodules and hooks. In `shown` they have the values that they had before, with other Parameters. So Parameters
    that a host has divided, flattened or put hooks on stay as they are.

    Args:
        mask: not applied yet.
    """

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._before = {module: _attributes(module) for module in mask.model.modules()}
        averaged = averaged_buffers(mask)
        self._constants = [name for name in mask.buffers if name not in averaged]
        self._before_masking = {n: mask.buffers[n].clone() for n in self._constants if mask.is_partial(n)}
        self.is_shown = False

    def keep_changed(self) -> None:
        """Call it once the model is the subnetwork."""
        for module, before in self._before.items():
            now = vars(module)
            names = [name for name in {**before, **now} if before.get(name, _NONE) is not now.get(name, _NONE)]
            self._before[module] = {name: before.get(name, _NONE) for name in names}

    def initialize(self, weights: DeferredWeights, seed: int) -> None:
        """Of a model built under `Init`: take what masking has removed of constants from there."""
        with unchanged_random_state():
            self._before_masking = {
                name: like(weights.value(name, seed), self._mask.buffers[name]) for name in self._before_masking
            }

    def constants(self) -> dict[str, torch.Tensor]:
        """Buffers of the dense model that teams do not average, by dense name; absent ones as they were before."""
        constants = {}
        for name in self._constants:
            constants[name] = self._mask.model.get_buffer(name)
            if name in self._before_masking:
                dense = self._before_masking[name]
                for piece in self._mask.held_pieces(name):
                    piece.narrow(dense).copy_(self._mask.view(piece, of=constants[name]))
                constants[name] = dense
        return constants

    @contextmanager
    def shown(self, values: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[nn.Parameter]]:
        """Context in which the modules are the dense model's.

        Args:
            values: of all parameters and averaged buffers, by dense name, in any dtype.

        Yields:
            The parameters.
        """
        shown: list[nn.Parameter] = []
        tensors: dict[int, torch.Tensor] = {}  # by the id of the parameter or buffer that they replace
        for name, value in values:
            if name in self._mask.buffers:
                tensors[id(self._mask.buffers[name])] = like(value, self._mask.buffers[name])
                continue
            given = self._mask.parameters[name]
            shown.append(nn.Parameter(like(value, given), requires_grad=self._mask.trainable[name]))
            tensors[id(given)] = shown[-1]
        for name, buffer in self.constants().items():
            tensors[id(self._mask.buffers[name])] = buffer
        now = {}
        for module, before in self._before.items():
            now[module] = {name: vars(module).get(name, _NONE) for name in before}
            dense = {name: _replaced(value, tensors) for name, value in before.items()}
            _set(module, dense)
        self.is_shown = True
        try:
            yield shown
        finally:
            for module, attributes in now.items():
                _set(module, attributes)
            self.is_shown = False


def like(values: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Values with the device and dtype of a tensor; rounded, if those are integers."""
    return (values if tensor.is_floating_point() else values.round()).to(tensor.device, tensor.dtype)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module; private containers, such as those of parameters and hooks, are copied."""
    return {
        name: value.copy() if name.startswith("_") and isinstance(value, dict | list) else value
        for name, value in vars(module).items()
    }


def _set(module: nn.Module, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not _NONE:
            vars(module)[name] = value
        else:
            vars(module).pop(name, None)


def _replaced(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """A dict or list with other tensors in place of those with these ids; an `nn.LSTM` has its weights in a list."""
    if isinstance(value, dict):
        value = value.copy()
        value.update((key, tensors[id(item)]) for key, item in value.items() if id(item) in tensors)
    elif isinstance(value, list):
        value = [tensors.get(id(item), item) for item in value]
    return value
