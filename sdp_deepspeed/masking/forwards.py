"""Replace the `forward` of a module instance, as Accelerate's hooks do.

The new forward is bound to a `ReplacedForward`, which refers to the module and its previous forward, so that a deep
copy of a masked module is an independent masked module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class ReplacedForward:
    """A replaced forward.

    Args:
        module: whose attributes `run_with` changes; by default the one whose forward it is.
    """

    module: Any
    previous: Callable[..., Any]
    state: Any


def replace_forward(
    module: nn.Module, function: Callable[..., Any], state: Any = None, of: nn.Module | None = None
) -> None:
    """Make `module.forward` call `function(ReplacedForward(...), *args, **kwargs)`. It may happen several times.

    Args:
        of: `ReplacedForward.module`.
    """
    replaced = ReplacedForward(module if of is None else of, module.forward, state)
    vars(module).update(forward=MethodType(function, replaced), _sdp_forward=replaced)


def restore_forward(module: nn.Module) -> None:
    """Undo the last `replace_forward`, and any changes of the forward since."""
    previous = vars(module).pop("_sdp_forward").previous
    del vars(module)["forward"]
    if isinstance(outer := getattr(previous, "__self__", None), ReplacedForward):
        vars(module)["_sdp_forward"] = outer
    if getattr(previous, "__func__", None) is not type(module).forward:
        vars(module)["forward"] = previous


def run_with(forward: ReplacedForward, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward with other values of its attributes. Instance attributes precede parameters."""
    attributes = vars(forward.module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        return forward.previous(*args, **kwargs)
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set data of a different shape, and drop the gradient, which has the old shape.

    If a graph is still alive (a user keeps the last loss), it holds the tensor's AccumulateGrad node, which expects the
    old shape and would fail in the next backward pass. Changing the dtype in between makes autograd drop the node.
    """
    if tensor.requires_grad:
        tensor.grad = None
    if tensor.is_floating_point():
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
