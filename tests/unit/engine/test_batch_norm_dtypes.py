"""Batch norms that DeepSpeed has cast by halves are refused before their first pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.engine.batch_norm_dtypes import check_batch_norm_dtypes


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_weights_in_other_bits_than_statistics(dtype: torch.dtype, word: str) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    check_batch_norm_dtypes(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    with pytest.raises(RuntimeError):  # else there would be nothing to refuse
        model(torch.ones(2, 3, 2, 2, dtype=dtype))
    with pytest.raises(ValueError, match=rf"1 \(BatchNorm2d\) has weights .*float32.*torch_autocast.*\"{word}\""):
        check_batch_norm_dtypes(model)
    check_batch_norm_dtypes(model.to(dtype))


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}])
def test_what_has_no_weights_or_no_statistics(options: dict[str, bool]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4, **options))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    check_batch_norm_dtypes(model)
