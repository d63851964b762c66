"""What a run on images will take, against real tensors of the same subnetwork and the units' own figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageClassification

from sdp_deepspeed.architectures.image_flops import flops_per_element
from sdp_deepspeed.config import KEY, MODES, parse
from sdp_deepspeed.estimate.forecast import classifies_images, forecast
from sdp_deepspeed.estimate.per_rank import estimate
from sdp_deepspeed.estimate.settings import setup_of
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors
from tests.helpers.measured import Saved

pytestmark = pytest.mark.slow

RANKS, MICRO, SIZE = 2, 3, 32
SHAPE: dict[str, Any] = {
    "model_type": "resnet",
    "layer_type": "basic",
    "embedding_size": 8,
    "hidden_sizes": [16, 32],
    "depths": [3, 3],
    "image_size": SIZE,
}
BATCH = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2}


def build() -> Any:
    return AutoModelForImageClassification.from_config(AutoConfig.for_model(**SHAPE))


def test_which_models_classify_images() -> None:
    found = {
        name: classifies_images({"model_type": name}) for name in ("resnet", "swin", "vit", "llama", "gpt2", "xyz")
    }
    assert [name for name, images in found.items() if images] == ["resnet", "swin", "vit"]


def test_flops_of_the_dense_model_are_those_of_its_weights() -> None:
    """Forward once, backward twice, but for the gradient of the images."""
    model = build()
    figures = forecast(SHAPE, BATCH, num_ranks=RANKS)
    per_element = flops_per_element(model)
    assert per_element is not None
    flops = {name: int(per_element[name] * parameter.numel()) for name, parameter in model.named_parameters()}
    stem = next(iter(flops.values()))
    assert figures.flops == 2 * MICRO * (3 * sum(flops.values()) - stem)
    assert figures.tokens_per_step == 2 * MICRO * RANKS
    assert figures.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_subnetwork_keeps_and_holds_what_real_tensors_do(mode: Any) -> None:
    block = {"regime": mode.regime, "strategy": mode.strategy, "coverage": 0.5}
    config = BATCH | {KEY: block, "zero_optimization": {"stage": 1}}
    figures, parsed = forecast(SHAPE, config, num_ranks=RANKS), parse(config)
    assert parsed is not None
    plan, _ = plan_model(build(), parsed, RANKS)
    per_rank, found = estimate(plan, dense_tensors(build()), setup_of(config, accumulation=2)), set()
    for rank in range(RANKS):
        real = build().train()
        Mask(real, plan, rank).apply()
        with Saved([*real.parameters(), *real.buffers()]) as saved:
            real(pixel_values=torch.zeros(MICRO, 3, SIZE, SIZE), labels=torch.zeros(MICRO, dtype=torch.long))
        found.add((saved.num_bytes, per_rank[rank].weights))
        if mode.regime == "forward":
            assert per_rank[rank].weights == 4 * sum(parameter.numel() for parameter in real.parameters())
    assert (figures.activations, figures.rank.weights) in found
    dense = forecast(SHAPE, BATCH | {"zero_optimization": {"stage": 1}}, num_ranks=RANKS)
    assert figures.flops < dense.flops
    assert figures.rank.state < dense.rank.state


def test_images_of_224_where_nothing_says_a_size() -> None:
    without = {key: value for key, value in SHAPE.items() if key != "image_size"}
    large, small = (forecast(shape, BATCH, num_ranks=RANKS).flops for shape in (without, SHAPE))
    assert large > 45 * small, "49 times the positions, but for the head"


def test_a_stem_for_small_images() -> None:
    """Of the package's own type, whose convolutions run at all 32 x 32 positions first."""
    shape = {"model_type": "sdp_small_image_resnet", "stage_sizes": [8, 16], "depths": [2, 2], "image_size": SIZE}
    config = BATCH | {KEY: {"coverage": 0.5, "strategy": "neuron"}}
    figures = forecast(shape, config, num_ranks=RANKS)
    assert figures.flops < forecast(shape, BATCH, num_ranks=RANKS).flops
    assert figures.activations > MICRO * 8 * SIZE**2 * 4
