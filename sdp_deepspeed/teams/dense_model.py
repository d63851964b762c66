"""The dense model in the modules of a team's subnetwork, for any host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.masking import Mask

_NONE: Any = object()  # an attribute that a module does not have


class DenseModel:
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
        absent = [name for name in mask.buffers if not all(mask.is_held(piece) for piece, _ in mask.pieces_of(name))]
        if mask.plan.regime == "backward":
            absent = []  # all teams run all modules
        self._buffers = {name: mask.buffers[name].clone() for name in absent}
        self.is_shown = False

    def keep_changed(self) -> None:
        """Call it once the model is the subnetwork."""
        for module, before in self._before.items():
            now = vars(module)
            names = [name for name in {**before, **now} if before.get(name, _NONE) is not now.get(name, _NONE)]
            self._before[module] = {name: before.get(name, _NONE) for name in names}

    @contextmanager
    def shown(self, values: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[nn.Parameter]]:
        """Context in which the modules are the dense model's.

        Args:
            values: of all parameters, by dense name, in any dtype.

        Yields:
            The parameters.
        """
        shown: list[nn.Parameter] = []
        tensors: dict[int, torch.Tensor] = {}  # by the id of the parameter or buffer that they replace
        for name, value in values:
            given = self._mask.parameters[name]
            value = value.to(given.device, given.dtype)
            shown.append(nn.Parameter(value, requires_grad=self._mask.trainable[name]))
            tensors[id(given)] = shown[-1]
        for name, buffer in self._buffers.items():
            for piece, _ in self._mask.pieces_of(name):
                if self._mask.is_held(piece):
                    piece.narrow(buffer).copy_(self._mask.view(piece))
            tensors[id(self._mask.buffers[name])] = buffer
        now = {}
        for module, before in self._before.items():
            now[module] = {name: vars(module).get(name, _NONE) for name in before}
            buffers = now[module]["_buffers"]
            dense = {name: _replaced(value, tensors) for name, value in before.items()}
            dense["_buffers"] = {name: tensors.get(id(b), buffers.get(name)) for name, b in before["_buffers"].items()}
            _set(module, dense)
        self.is_shown = True
        try:
            yield shown
        finally:
            for module, attributes in now.items():
                _set(module, attributes)
            self.is_shown = False


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
