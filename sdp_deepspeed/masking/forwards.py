"""Another `forward` for one module, as Accelerate's hooks have it.

The new forward is a method bound to the module, and what it needs is the module's own attribute, so that a deep copy of
a masked module is a masked module of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn


def replace_forward(module: nn.Module, function: Callable[..., Any], state: Any) -> None:
    """Have `module.forward` call `function(module, *args, **kwargs)`.

    Args:
        function: reads `module._sdp_state`; the forward from before is `module._sdp_forward`.
        state: what it needs.
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
    """Give a tensor data of another shape; its gradient, which would have the old one, is dropped.

    A graph that is still alive (a user keeps the last loss) holds the tensor's AccumulateGrad node, which knows the old
    shape and would fail in the next backward pass. Autograd forgets the node when the dtype changes in between.
    """
    if tensor.requires_grad:
        tensor.grad = None
    if tensor.is_floating_point():
        other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = data
