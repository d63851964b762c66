"""DeepSpeed casts parameters and leaves buffers as they are; a batch norm does not run with both."""

from __future__ import annotations

from typing import Any

from torch import nn

from sdp_deepspeed.architectures.branch import BATCH_NORMS
from sdp_deepspeed.config import KEY


def check_batch_norm_dtypes(model: nn.Module) -> None:
    """Whether batch norms can run as DeepSpeed has cast them.

    Raises:
        ValueError: weights in 16 bits beside running statistics in fp32, by the first name.
    """
    for name, module in model.named_modules():
        if not isinstance(module, BATCH_NORMS):
            continue
        weight, mean = module.weight, module.running_mean
        if weight is not None and mean is not None and weight.itemsize < mean.itemsize:
            raise ValueError(
                f"{KEY}: {name} ({type(module).__name__}) has weights in {_word(weight)} and running statistics in "
                f"{_word(mean)}, with which it does not run: train in fp32 with torch_autocast, or set "
                f'data_types.buffer_dtype to "{_SHORT.get(_word(weight), "bf16")}", in which statistics are coarse'
            )


_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def _word(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
