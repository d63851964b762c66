"""Whether a module still has the Parameters that it had: others in their place nobody would average or step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.messages import quoted


class KnownParameters:
    """The Parameters of a module as the objects that they are now.

    Args:
        parameters: by name.
        frozen: names of those in the optimizer's groups that did not require gradients.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], frozen: Sequence[str]) -> None:
        self._model = model
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = dict(parameters)  # keeps them, so that their ids stay theirs
        self._frozen = list(frozen)
        self._remember()

    def _remember(self) -> None:
        """All places where a Parameter, or a module with some, could be replaced."""
        slots: list[tuple[Any, str, Any]] = [
            (registry, key, value)
            for module in self._model.modules()
            for registry in (module._parameters, module._modules)
            for key, value in registry.items()
        ]
        self._registries, self._keys, self._values = ([slot[index] for slot in slots] for index in range(3))

    def check(self) -> None:
        """Cheap enough for each step.

        Raises:
            RuntimeError: by name, Parameters that were replaced, or require gradients only now.
        """
        thawed = [name for name in self._frozen if self._parameters[name].requires_grad]
        if thawed:
            raise RuntimeError(
                f"{quoted(thawed)} did not require gradients when deepspeed.initialize was called, so nobody would "
                "train them: let them require gradients before, and freeze them after it if that is meant"
            )
        get: Any = dict.get
        if all(map(operator.is_, map(get, self._registries, self._keys), self._values)):
            return
        found = dict(self._model.named_parameters())
        unknown = [name for name, p in found.items() if id(p) not in self._names and p.requires_grad]
        lost = [name for i, name in self._names.items() if i not in {id(p) for p in found.values()} and name in found]
        if unknown or lost:
            raise RuntimeError(
                f"the model does not have the Parameters that deepspeed.initialize got: nobody would train what is at "
                f"{quoted([*dict.fromkeys([*unknown, *lost])])}. Copy values into the first ones inside `with "
                "engine.dense():` on all ranks, or change the model before deepspeed.initialize"
            )
        self._remember()  # modules were wrapped, or taken out
