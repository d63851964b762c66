"""Floating-point operations that one rank does, counted instead of timed: counts do not depend on a machine's noise.

Operations are those of matrix products and attention, multiply and add counted as two; elementwise work (norms,
activations, the optimizer) is left out, and a causal mask counts as full, as in PyTorch's own formulas. PyTorch's own
FlopCounterMode would replace operators by what they decompose into, which rounds otherwise: a measured step must not.
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
    """As much as forward for the gradient of the input, and for that of the weight, whichever are asked for."""
    transposed, output_mask = rest[4], rest[7]
    forward = conv_flop_count([*x.shape], [*weight.shape], [*gradient.shape], transposed)
    return int(forward * sum(output_mask[:2]))


# PyTorch's formulas know attention's kernels of GPUs only, and take backward convolutions of groups for whole ones.
_OTHERS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.convolution_backward: _convolution_backward,
}
_FORMULAS: dict[Any, Callable[..., int]] = {**flop_registry, **_OTHERS}


class FlopCounter(TorchDispatchMode):
    """Counts what this rank does while the block runs, which is slower for it; no collective of its own.

    Attributes:
        total: operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result
