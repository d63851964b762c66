"""Replace the data of a tensor object, which keeps its identity: by data of another shape, or on another device."""

from __future__ import annotations

import torch


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


def move_in_place(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Move a tensor object to another device, keeping its identity. `swap_tensors` refuses tensors with weak
    references, and `.data` refuses a different device."""
    torch._C._swap_tensor_impl(tensor, value.requires_grad_(tensor.requires_grad))
