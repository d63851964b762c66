"""What one rank does in one step, counted instead of timed: floating-point operations and bytes sent.

Counts do not depend on the machine's noise. Operations are those of matrix products and attention, multiply and add
counted as two; elementwise work (norms, activations, the optimizer) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from sdp_deepspeed.measure.traffic import TrafficCounter

Shape = Sequence[int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


# PyTorch's counter knows the kernels of GPUs only. Like its own formulas, these count a causal mask as full.
_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def count_work(step: Callable[[], object]) -> dict[str, int]:
    """FLOPs and bytes sent by this rank while `step` runs, which is slower for it; no collective of its own."""
    traffic, operations = TrafficCounter(), FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    with traffic, operations:
        step()
    return {"flops": operations.get_total_flops(), "sent_bytes": traffic.total}
