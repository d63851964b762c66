"""A body once more, with other parameters: how the lacking half of a branch runs beside the held one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.masking.mixins import mixed_in


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


def twin_of(module: nn.Module, replaced: Mapping[int, nn.Parameter], left_out: Sequence[str]) -> nn.Module:
    """`module` and its modules once more, with other parameters and without the modules of the paths `left_out`."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__.pop("_compiled_call_impl", None)  # of the module itself, with its own weights
    twin._parameters = {name: None if p is None else replaced.get(id(p), p) for name, p in module._parameters.items()}
    twin._modules = {}
    for name, child in module._modules.items():
        below = [path.removeprefix(f"{name}.") for path in left_out if path.startswith(f"{name}.")]
        if name in left_out:
            twin._modules[name] = nn.Identity()
        elif child is None or not (below or any(id(p) in replaced for p in child.parameters())):
            twin._modules[name] = child  # who changes it later, or hooks it, does so for all
        else:
            twin._modules[name] = twin_of(child, replaced, below)
            twin._modules[name].__class__ = mixed_in(LayerCopy, type(child))
            object.__setattr__(twin._modules[name], "_sdp_layer", child)
    return twin
