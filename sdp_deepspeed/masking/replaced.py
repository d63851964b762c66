"""Whether a module still has the Parameters that it had: others, put in their place, nobody would average or step."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.messages import listed, quoted


class KnownParameters:
    """The Parameters of a module as the objects that they are now.

    Args:
        module: the whole model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._ids = {id(parameter): name for name, parameter in _parameters(module)}
        self._names = {name for name, _ in _parameters(module)}
        self._slots = list(_slots(module))  # keeps Parameters, so that their ids stay theirs
        self._remember()

    def _remember(self) -> None:
        """All places where a Parameter, or a module with some, could be replaced."""
        slots: list[tuple[Any, str, Any]] = [
            (registry, name, value)
            for module in self._module.modules()
            for registry in (module._parameters, module._modules)
            for name, value in registry.items()
        ]
        self._registries, self._keys, self._values = ([slot[index] for slot in slots] for index in range(3))

    def check(self) -> None:
        """Cheap enough for each step.

        Raises:
            RuntimeError: by name, Parameters that came after, or that are gone from modules that are still there.
        """
        get: Any = dict.get
        if all(map(operator.is_, map(get, self._registries, self._keys), self._values)):
            return
        unknown = [
            name
            for name, parameter in _parameters(self._module)
            if id(parameter) not in self._ids and (name in self._names or parameter.requires_grad)
        ]
        lost = [
            name
            for name, module, key, parameter in self._slots
            if module._parameters.get(key) is None and not _has(module, parameter)
        ]
        if unknown or lost:
            raise RuntimeError(
                f"the model does not have the Parameters that deepspeed.initialize got: nobody would train what is at "
                f"{quoted([*unknown, *lost])}. Copy values into the first ones, inside engine.dense(resident=True) on "
                "all ranks, or change the model before deepspeed.initialize"
            )
        self._remember()  # modules were wrapped, or taken out


class ReplaceableTensors:
    """The Parameters and buffers of a module, for a while in which others may be put in their place.

    Args:
        module: the whole model, dense.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            (f"{path}.{name}" if path else name, registry, name, tensor)
            for path, inner in module.named_modules()
            for registry in (inner._parameters, inner._buffers)
            for name, tensor in registry.items()
            if tensor is not None
        ]

    @torch.no_grad()
    def put_back(self) -> RuntimeError | None:
        """Put replaced tensors back, with the values of those that replaced them.

        Returns:
            The error that names those whose values cannot be taken over, if there are some.
        """
        wrong = []
        for path, registry, name, tensor in self._slots:
            other = registry.get(name)
            if other is tensor:
                continue
            registry[name] = tensor
            if other is None or other.is_meta or other.shape != tensor.shape:
                found = "nothing" if other is None else f"{tuple(other.shape)} on {other.device}"
                wrong.append(f"{path!r} ({found} for {tuple(tensor.shape)} on {tensor.device})")
            else:
                tensor.copy_(other)
        if not wrong:
            return None
        return RuntimeError(
            f"inside engine.dense(resident=True) {listed(wrong)} was replaced by what has no such values; it is as it "
            "was before. Give tensors of the same shape"
        )


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _slots(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Each Parameter's path, its module and its name there."""
    for path, inner in module.named_modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                yield f"{path}.{key}" if path else key, inner, key, parameter


def _has(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Under another name too, as PyTorch's parametrizations do it."""
    return any(other is parameter for other in module.parameters())
