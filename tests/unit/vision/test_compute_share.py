"""FLOPs of a plan's step, as a share of data parallelism's."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY
from sdp_deepspeed.vision.compute_share import compute_share
from sdp_deepspeed.vision.shapes import full_shape

SHAPE = full_shape(
    {
        "model_type": "vit",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "patch_size": 4,
    },
    ["a", "b"],
    8,
)


def share(**block: Any) -> float:
    return compute_share(SHAPE, {KEY: block}, num_ranks=4, image_size=8)


def test_shares() -> None:
    assert compute_share(SHAPE, {}, num_ranks=4, image_size=8) == 1
    assert share(coverage=1.0) == 1
    assert share(coverage=0.5) == pytest.approx(0.5, abs=0.05), "embedding and head are with every worker"
    assert share(coverage=0.5, strategy="neuron") == pytest.approx(0.5, abs=0.05)
    assert share(coverage=0.5, regime="backward") == pytest.approx(5 / 6, abs=0.05), "a sixth is saved"


def test_it_is_the_mean_where_subnetworks_are_uneven() -> None:
    """Of six units one of four workers has one and another two: what is divided counts by its coverage all the same."""
    shape = SHAPE | {"num_hidden_layers": 3}

    def of(coverage: float) -> float:
        return compute_share(shape, {KEY: {"coverage": coverage}}, num_ranks=4, image_size=8)

    divided = 2 * (1 - of(0.5))
    assert of(0.25) == pytest.approx(1 - 0.75 * divided, abs=1e-3)


def test_a_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--equal-flops: with subnetwork_data_parallel.schedule the share changes"):
        share(schedule=[{"until_step": 3, "coverage": 0.5}, {"coverage": 1.0}])
