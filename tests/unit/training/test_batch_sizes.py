"""Batches of a rank, from two or three of DeepSpeed's sizes."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.training.batch_sizes import micro_steps


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (2, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, (2, 3)),
        ({"train_batch_size": 24}, (6, 1)),
        ({"train_micro_batch_size_per_gpu": 5}, (5, 1)),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5}, (2, 5)),
    ],
)
def test_batch_sizes(config: dict[str, Any], expected: tuple[int, int]) -> None:
    assert micro_steps(config, 4) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "give train_micro_batch_size_per_gpu"),
        ({"train_batch_size": 3}, "or a larger train_batch_size"),
        ({"train_batch_size": "24"}, "train_batch_size: got '24', expected a whole number"),
        ({"train_micro_batch_size_per_gpu": True}, "got True, expected a whole number"),
        ({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 2}, "is 25, but 4 ranks .* make 24"),
        ({"train_batch_size": 26}, "is 26, but 4 ranks with micro-batches of 6 and 1 micro-steps make 24"),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}, "is 4, but 4 ranks .* make 0"),
    ],
)
def test_batch_sizes_that_contradict_each_other(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        micro_steps(config, 4)
