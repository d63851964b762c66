"""Replace the `forward` of a module instance, as Accelerate's hooks do.

The new forward is a method bound to the module, and its state is an attribute of the module, so that a deep copy of a
masked module is an independent masked module.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn


def replace_forward(module: nn.Module, function: Callable[..., Any], state: Any) -> None:
    """Make `module.forward` call `function(module, *args, **kwargs)`.

    Args:
        function: uses `module._sdp_state` and the previous forward, `module._sdp_forward`.
        state: stored as `module._sdp_state`.
    """
    assert "_sdp_state" not in vars(module), "a module belongs to one branch and is masked once"
    vars(module).update(_sdp_own=vars(module).get("forward"), _sdp_forward=module.forward, _sdp_state=state)
    vars(module)["forward"] = MethodType(function, module)


def restore_forward(module: nn.Module) -> None:
    """Undo `replace_forward`."""
    own = vars(module).pop("_sdp_own")
    for name in ("forward", "_sdp_forward", "_sdp_state"):
        del vars(module)[name]
    if own is not None:
        vars(module)["forward"] = own


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Set data of another shape, and drop the gradient, which has the old shape.

    If a graph is still alive (a user keeps the last loss), it holds the tensor's AccumulateGrad node, which expects the
    old shape and would fail in the next backward pass. Changing the dtype in between makes autograd drop the node.
    """
    if tensor.requires_grad:
        tensor.grad = None
    if tensor.is_floating_point():
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
