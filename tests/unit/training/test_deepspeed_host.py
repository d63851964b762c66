"""DeepSpeed as the training program's host, as far as no ranks are needed."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.training.deepspeed_host import check_deepspeed_reads


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": "x"}}, "ValidationError.*stage"),
        ({"train_micro_batch_size_per_gpu": 1, "tensorboard": 3}, "Error"),
        ({}, "AssertionError.*train_micro_batch_size_per_gpu"),
    ],
)
def test_a_config_that_deepspeed_cannot_read_is_one_line(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^--deepspeed_config: DeepSpeed cannot read it: .*{words}") as caught:
        check_deepspeed_reads(config)
    assert "\n" not in str(caught.value)
