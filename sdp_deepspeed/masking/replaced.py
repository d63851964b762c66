"""Detect replaced Parameters, which would be neither averaged nor stepped."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.messages import quoted


class KnownParameters:
    """The Parameter objects of a module at construction.

    Args:
        frozen: names of parameters in the optimizer that did not require gradients.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], frozen: Sequence[str]) -> None:
        self._model = model
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = dict(parameters)  # keeps them alive, so that ids stay unique
        self._frozen = list(frozen)
        self._remember()

    def _remember(self) -> None:
        """Record all places where a Parameter, or a module with Parameters, could be replaced."""
        self._registries: list[Any] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        for module in self._model.modules():
            registries: tuple[Any, Any] = (module._parameters, module._modules)
            for registry in registries:
                self._registries += [registry] * len(registry)
                self._keys += registry.keys()
                self._values += registry.values()

    def check(self) -> None:
        """Check the module; cheap enough for each step.

        Raises:
            RuntimeError: Parameters were replaced, or have started to require gradients.
        """
        thawed = [name for name in self._frozen if self._parameters[name].requires_grad]
        if thawed:
            raise RuntimeError(
                f"{quoted(thawed)} did not require gradients at deepspeed.initialize, so it would not be trained; "
                "enable gradients before that call, and freeze it afterwards"
            )
        get: Any = dict.get
        if all(map(operator.is_, map(get, self._registries, self._keys), self._values)):
            return
        current = dict(self._model.named_parameters())
        current_ids = {id(parameter) for parameter in current.values()}
        unknown = [name for name, p in current.items() if id(p) not in self._names and p.requires_grad]
        lost = [name for known, name in self._names.items() if known not in current_ids and name in current]
        if unknown or lost:
            raise RuntimeError(
                f"Parameters were replaced after deepspeed.initialize: {quoted([*dict.fromkeys([*unknown, *lost])])}; "
                "do that before it, or copy values into the original ones, inside `with engine.dense():`"
            )
        self._remember()  # no Parameter was replaced: modules were wrapped or removed
