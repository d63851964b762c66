"""The gradient norm in the precision of its gradients, at least fp32."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sdp_deepspeed.parallel import norm


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64,)])
def test_the_norm_is_not_rounded(dtypes: Sequence[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm.dist, "get_world_size", lambda: 1)
    gradients = [torch.ones(1001, dtype=dtype) for dtype in dtypes]
    of_empty = norm.gradient_norm([*gradients, torch.zeros(0)], torch.device("cpu"), float("inf"))  # an empty shard
    assert of_empty == 1
    assert float(norm.gradient_norm(gradients, torch.device("cpu"))) == pytest.approx((1001 * len(dtypes)) ** 0.5, 1e-6)
