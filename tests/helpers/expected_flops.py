"""FLOPs of a worker's forward and backward pass: those of the dense model, counted by torch's `FlopCounterMode`,
without those of units that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sdp_deepspeed.plan.plan import Plan
from tests.reference.virtual_workers import held_mask


@dataclass(frozen=True)
class DenseFlops:
    """FLOPs of the dense model.

    Args:
        total: FLOPs of a forward and backward pass.
        of_modules: FLOPs of the forward pass by dense name of the module, without its children.
    """

    total: int
    of_modules: Mapping[str, int]


def dense_flops(model: nn.Module, loss: Callable[[], torch.Tensor]) -> DenseFlops:
    """Count FLOPs of a forward and backward pass of the dense model, without activation checkpointing.

    Args:
        loss: runs the forward pass of `model` and returns the loss.
    """
    with FlopCounterMode(display=False) as forward:
        value = loss()
    with FlopCounterMode(display=False) as backward:
        value.backward()
    counts = {path: sum(by_operator.values()) for path, by_operator in forward.get_flop_counts().items()}
    root = type(model).__name__
    of_modules = {name: counts.get(f"{root}.{name}" if name else root, 0) for name, _ in model.named_modules()}
    for name in reversed(of_modules):  # children before parents; a ModuleList does not count
        parent = name.rpartition(".")[0]
        while parent and f"{root}.{parent}" not in counts:
            parent = parent.rpartition(".")[0]
        if name:
            of_modules[parent] -= counts.get(f"{root}.{name}", 0)
    return DenseFlops(forward.get_total_flops() + backward.get_total_flops(), of_modules)


def worker_flops(
    model: nn.Module, plan: Plan, subnetwork: int, dense: DenseFlops, replaced: Collection[str] = ()
) -> int:
    """FLOPs of a worker's forward and backward pass.

    Forward regime: an absent unit saves the forward pass, the gradient of inputs and that of weights (or the other
    operand), each with the same FLOPs. Backward regime: it saves only the gradient of weights.

    Args:
        replaced: modules that absent branches replace. Others run: a product of activations there, in the forward pass
            only, is one of zeros.
    """
    held = held_mask(model, plan, subnetwork)
    total = dense.total
    for name, module in model.named_modules():
        if not dense.of_modules[name]:
            continue
        absent = dense.of_modules[name] * _absent_share(module, name, held)
        assert absent.denominator == 1, f"{name}: {absent} of {dense.of_modules[name]} FLOPs"
        has_weights = any(p.dim() > 1 for p in module.parameters(recurse=False))  # else it multiplies activations
        runs = absent == dense.of_modules[name] and not any(f"{name}.".startswith(f"{other}.") for other in replaced)
        saved = 2 if runs and not has_weights else 3
        total -= int(absent) * (saved if plan.regime == "forward" else int(has_weights))
    return total


def _absent_share(module: nn.Module, name: str, held: Mapping[str, torch.Tensor]) -> Fraction:
    """Absent share of the matrices in a module and its submodules."""
    prefix = f"{name}." if name else ""
    names = [prefix + name for name, parameter in module.named_parameters() if parameter.dim() > 1]
    masks = [held[name] for name in names if name in held]  # tied ones have their first name
    cut = [mask for mask in masks if not mask.all()]
    return 1 - Fraction(int(sum(mask.sum() for mask in cut)), sum(mask.numel() for mask in cut)) if cut else Fraction(0)
