"""DeepSpeed's Muon with clipping in ZeRO stages 1 and 2, where DeepSpeed clips what it steps: orthogonalized matrices,
and gradients of Adam. The norm is that of both.

Everywhere else (its stage 0, its `BF16_Optimizer`, PyTorch's Muon) the gradient is clipped, then orthogonalized.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def is_deepspeeds_muon(optimizer: torch.optim.Optimizer) -> bool:
    return any(base.__module__.startswith("deepspeed.runtime.zero.muon") for base in type(optimizer).__mro__)


def orthogonalize(optimizer: torch.optim.Optimizer) -> None:
    """Replace gradients of matrices by Muon's updates, in place."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update  # an FSDP2 run has no DeepSpeed

    for group, parameter in _matrices(optimizer):
        state = optimizer.state[parameter]
        momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
        update = muon_update(parameter.grad, momentum, beta=group["momentum"], ns_method=group.get("ns_method", "gram"))
        parameter.grad.copy_(update.reshape(parameter.shape))


def step_with_updates(optimizer: torch.optim.Optimizer) -> None:
    """Step matrices by the updates in their gradients, and the other parameters with the optimizer."""
    for group, parameter in _matrices(optimizer):
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(parameter.grad, alpha=-group["lr"])
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if not group["use_muon"]]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups


def _matrices(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    return ((group, p) for group in optimizer.param_groups if group["use_muon"] for p in group["params"])
