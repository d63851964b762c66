"""Floating-point operations that one rank does, counted instead of timed: counts do not depend on a machine's noise.

Operations are those of matrix products and attention, multiply and add counted as two; elementwise work (norms,
activations, the optimizer) is left out, and a causal mask counts as full, as in PyTorch's own formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# PyTorch's counter knows the kernels of GPUs only.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def flop_counter() -> FlopCounterMode:
    """A context whose `get_total_flops` says what this rank did inside; no collective. What runs inside is slower."""
    return FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
