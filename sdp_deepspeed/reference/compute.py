"""FLOPs that a worker's forward and backward pass saves, of what the plan says and torch's `FlopCounterMode` measures."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import held_mask


def dense_flops(model: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[int, dict[str, int]]:
    """Of one forward and backward pass of the dense model.

    Args:
        loss: runs the forward pass of `model`.

    Returns:
        All FLOPs, and those of the forward pass that each module spends itself, not in a child; by dense name.
    """
    with FlopCounterMode(display=False) as forward:
        value = loss()
    with FlopCounterMode(display=False) as backward:
        value.backward()
    counts = {name: sum(by_operator.values()) for name, by_operator in forward.get_flop_counts().items()}
    root = type(model).__name__
    own: dict[str, int] = {}
    for name, module in model.named_modules():
        path = f"{root}.{name}" if name else root
        children = sum(counts.get(f"{path}.{child}", 0) for child, _ in module.named_children())
        own[name] = counts.get(path, 0) - children
    return forward.get_total_flops() + backward.get_total_flops(), own


def saved_flops(model: nn.Module, plan: Plan, subnetwork: int, own: dict[str, int]) -> int:
    """What a worker need not compute in one forward and backward pass, without activation checkpointing.

    A lacking part is left out of the forward pass, of the gradient of its inputs and of that of its weights, each as
    many FLOPs (forward regime); or only of the last (backward regime), and only where weights are.

    Args:
        own: as `dense_flops` returns it.
    """
    held = held_mask(model, plan, subnetwork)
    total = 0
    for name, module in model.named_modules():
        if not own[name]:
            continue
        is_layer = next(module.children(), None) is None  # else it multiplies activations, such as those of heads
        lacking = own[name] * _share_lacking(module, name, held)
        assert lacking.denominator == 1, f"{name}: {lacking} of {own[name]} FLOPs"
        total += int(lacking) * (3 if plan.regime == "forward" else int(is_layer))
    return total


def _share_lacking(module: nn.Module, name: str, held: dict[str, Any]) -> Fraction:
    """Of the matrices in the module and below that the worker has not as a whole."""
    prefix = f"{name}." if name else ""
    names = [prefix + own for own, parameter in module.named_parameters() if parameter.dim() > 1]
    masks = [held[own] for own in names if own in held]  # a tied one is known by its first name
    cut = [mask for mask in masks if not mask.all()]
    return 1 - Fraction(int(sum(mask.sum() for mask in cut)), sum(mask.numel() for mask in cut)) if cut else Fraction(0)
