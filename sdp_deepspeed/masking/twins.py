"""A body once more, with other parameters: how the lacking half of a branch runs beside the held one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.masking.mixins import mixed_in
from sdp_deepspeed.masking.own_forward import settle_forward
from sdp_deepspeed.plan.tensors import named_tensors


class LayerCopy(nn.Module):
    """Mixed in before the class of a layer's copy, which has the lacking weights.

    Hooks of the layer run for the copy too; what they note on the module (a profiler its counts) is the layer's.
    """

    _sdp_layer: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_sdp_layer" not in self.__dict__:  # not there yet: it is being copied or unpickled
                raise
            return getattr(self._sdp_layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._sdp_layer, name, value)


class RunsOnce:
    """A module that is not cut, such as a mixture's router: it runs for the first half, and the second gets what it
    returned.

    So noise, running statistics, hooks and what the hosts record of it are those of one pass.

    Args:
        module: of the layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._returned: list[Any] = []
        self.first = _Runs(module, self._returned)
        self.second = _Returns(module, self._returned)


class _Stand(nn.Module):
    """Stands for a module; what is read from it is the module's."""

    _sdp_module: nn.Module
    _sdp_returned: list[Any]

    def __init__(self, module: nn.Module, returned: list[Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_sdp_module", module)  # not a child: its mode is the layer's
        self._sdp_returned = returned

    def __getattr__(self, name: str) -> Any:
        if "_sdp_module" not in self.__dict__:  # not there yet: it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._sdp_module, name)


class _Runs(_Stand):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._sdp_module(*args, **kwargs)
        self._sdp_returned[:] = [output]  # a pass that failed may have left its own
        return output


class _Returns(_Stand):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._sdp_returned.pop()


def _of(twin: nn.Module, value: Any, *, instead_of: nn.Module) -> Any:
    """A method that somebody keeps on a module, such as its old `forward`, is the twin's on the twin."""
    is_its_method = isinstance(value, MethodType) and value.__self__ is instead_of
    return MethodType(value.__func__, twin) if is_its_method else value


class CountedOnce(nn.Module):
    """Mixed in before the class of a batch norm's copy for the lacking channels, which shares the layer's count of
    batches, and runs after the layer has counted one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        count = self.num_batches_tracked
        if self.training and self.track_running_stats and isinstance(count, torch.Tensor):
            count.sub_(1)
        return super().forward(*args, **kwargs)


def twin_of(module: nn.Module, replaced: Mapping[int, torch.Tensor], others: Mapping[str, nn.Module]) -> nn.Module:
    """`module` and its modules once more, with other parameters and buffers, and with `others` at their paths."""
    settle_forward(module)
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = {name: _of(twin, value, instead_of=module) for name, value in module.__dict__.items()}
    twin.__dict__.pop("_compiled_call_impl", None)  # of the module itself, with its own weights
    own: dict[str, Any] = module._parameters
    twin._parameters = {name: replaced.get(id(parameter), parameter) for name, parameter in own.items()}
    twin._buffers = {name: replaced.get(id(buffer), buffer) for name, buffer in module._buffers.items()}
    twin._modules = {}
    if any(id(buffer) in replaced for buffer in module._buffers.values()):
        twin.__class__ = mixed_in(CountedOnce, type(module))
    for name, child in module._modules.items():
        below = {path.removeprefix(f"{name}."): o for path, o in others.items() if path.startswith(f"{name}.")}
        if name in others:
            twin._modules[name] = others[name]
        elif child is None or not (below or any(id(t) in replaced for t in named_tensors(child).values())):
            twin._modules[name] = child  # who changes it later, or hooks it, does so for all
        else:
            copied = twin_of(child, replaced, below)
            copied.__class__ = mixed_in(LayerCopy, type(copied))
            twin._modules[name] = copied
            object.__setattr__(twin._modules[name], "_sdp_layer", child)
    return twin
