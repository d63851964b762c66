"""`torch.nn.Module.zero_grad` for gradients that are not in `.grad`.

Accumulated and averaged gradients are in buckets (DeepSpeed), or not reduced yet (FSDP2). PyTorch's `zero_grad` would
keep these. The method is replaced in its class, because a model's gradients are also dropped through its parts and
through modules that contain it, and because copies of the model must not drop the original's.

Functions compiled with `torch.compile` call PyTorch's `zero_grad`, so they must call `engine.zero_grad()` (on FSDP2:
`zero_grad` outside the function) to drop a model's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import nn

# By model: a method that drops the gradients of parameters with these ids.
_drops: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[set[int]], None]]] = WeakKeyDictionary()


def extend_zero_grad(model: nn.Module, drop: Callable[[set[int]], None]) -> None:
    """Make `zero_grad` of a model, of its parts, and of modules that contain it drop all of its gradients.

    Args:
        drop: method that drops the gradients of the model's parameters with the given ids; weakly referenced.
    """
    _replace()
    _drops[model] = WeakMethod(drop)


@cache
def _replace() -> None:
    original = nn.Module.zero_grad

    @wraps(original)
    def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
        if _drops and not torch.compiler.is_compiling():  # fullgraph=True could not trace this
            parameters = {id(parameter) for parameter in module.parameters()}
            for reference in list(_drops.values()):
                if (drop := reference()) is not None:
                    drop(parameters)
        original(module, set_to_none)

    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign, assignment]
