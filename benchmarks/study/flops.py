"""Floating-point operations of a step by formula, as `sdp_deepspeed/estimate/flops.py` counts them.

Matrix products and attention, forward and backward, the head included; per token, over all workers. The forward regime
leaves out what a worker lacks; the backward regime only the gradients of its weights. Recomputing attention in its
backward pass counts, as in PyTorch's formula: five products where forward has two.
"""

from __future__ import annotations

from torch import nn

from benchmarks.study.model import Size
from benchmarks.study.text import VOCABULARY
from sdp_deepspeed.plan.plan import Plan

_ATTENTION = 1 + 2.5  # forward and backward, of the forward's


def dense_flops(size: Size) -> float:
    """Of a training step of data parallelism, per token."""
    return branches_flops(size) + _head(size)


def branches_flops(size: Size) -> float:
    """Of all residual branches."""
    return size.depth * (6 * size.layer_weights + _ATTENTION * _scores(size))


def kept_flops(size: Size, kept: float) -> float:
    """Of a step in which branches run for a share `kept` of the rows, per token."""
    return kept * branches_flops(size) + _head(size)


def plan_flops(model: nn.Module, size: Size, plan: Plan) -> float:
    """Of a step under a plan, per token and mean over workers."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    total = dense_flops(size)
    for index, unit in enumerate(plan.units):
        lacking = 1 - plan.coverage_of(index)
        weights = sum(p.num_elements(shapes[p.parameter]) for p in unit.pieces if len(shapes[p.parameter]) == 2)
        heads = sum(p.num_elements(shapes[p.parameter]) for p in unit.pieces if "o_proj.weight" in p.parameter)
        scores = _ATTENTION * _scores(size) * heads / size.width**2
        total -= lacking * (2 * weights if plan.regime == "backward" else 6 * weights + scores)
    return total


def _head(size: Size) -> float:
    return 6 * size.width * VOCABULARY


def _scores(size: Size) -> float:
    """Queries by keys and weights by values, all positions as in PyTorch's formula."""
    return 4 * size.length * size.width
