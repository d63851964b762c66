"""DeepSpeed's FusedAdam with its kernel in PyTorch: the real one would be compiled first, for minutes on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from deepspeed.ops.adam import fused_adam


@contextmanager
def not_compiled() -> Iterator[None]:
    """Optimizers that are built inside run the kernel below; all else of the class is DeepSpeed's."""
    builder = mock.Mock(**{"return_value.load.return_value": SimpleNamespace(multi_tensor_adam=_adamw)})
    with mock.patch.object(fused_adam, "FusedAdamBuilder", builder):
        yield


def _adamw(
    chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], lr: float, *more: Any
) -> None:  # arguments as the kernel's
    beta1, beta2, eps, step, is_adamw, has_bias_correction, decay = more
    assert (is_adamw, has_bias_correction) == (1, 1)
    for gradient, weight, average, square in zip(*lists, strict=True):
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(eps)
        weight.mul_(1 - lr * decay).addcdiv_(average, root, value=-lr / (1 - beta1**step))
