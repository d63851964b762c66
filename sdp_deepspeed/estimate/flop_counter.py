"""FLOPs of one rank, counted rather than timed.

Matrix products and attention are counted, a multiplication and an addition as two operations. Elementwise work (norms,
activation functions, the optimizer) is not, and a causal mask counts as full, as in PyTorch's formulas. PyTorch's
FlopCounterMode is not used because it decomposes operators, which changes rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_backward_flop_count, sdpa_flop_count


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _convolution_backward(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any, **_: Any) -> int:
    """The FLOPs of the forward pass for each requested gradient, of the input and of the weight."""
    transposed, output_mask = rest[4], rest[7]
    forward = conv_flop_count([*x.shape], [*weight.shape], [*gradient.shape], transposed)
    return int(forward * sum(output_mask[:2]))


# PyTorch has no formulas for attention on CPUs, and ignores groups in the backward pass of convolutions.
_OTHERS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
_FORMULAS: dict[Any, Callable[..., int]] = {**flop_registry, **_OTHERS}


class FlopCounter(TorchDispatchMode):
    """Context that counts FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result
