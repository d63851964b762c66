"""Forecasts of a run against products that a person can count; tests/ranks/estimate compares them with real ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.forecast import Forecast, forecast, model_of
from sdp_deepspeed.estimate.micro_step import classifies_images
from tests.helpers.models import LLAMA_LIKE

SHAPE = LLAMA_LIKE | {"model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 4}
MICRO, ACCUMULATION, RANKS, LENGTH = 2, 3, 2, 8
BATCH = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": ACCUMULATION}


def of(config: dict[str, Any], shape: dict[str, Any] = SHAPE, length: int | None = LENGTH, **options: Any) -> Forecast:
    model = model_of(shape, BATCH | config, sequence_length=length, **options)
    return forecast(model, BATCH | config, num_ranks=RANKS)


def test_flops_of_the_dense_model_are_those_of_its_matrices() -> None:
    """Forward once, backward twice; attention has two products forward, and five backward in a flash kernel."""
    figures = of({"zero_optimization": {"stage": 1}})
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE))
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]  # no look-up tables
    linear = 3 * 2 * MICRO * LENGTH * sum(weight.numel() for weight in matrices)
    attention = 4 * 2 * 7 * MICRO * 4 * LENGTH * LENGTH * 4  # layers, 7 products, rows, heads, [8, 4] by [4, 8]
    assert figures.flops == ACCUMULATION * (linear + attention)
    assert figures.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert figures.items_per_step == MICRO * ACCUMULATION * RANKS * LENGTH


def test_nothing_is_allocated() -> None:
    """400 GB of weights."""
    giant = SHAPE | {"vocab_size": 1_000_000, "hidden_size": 51_200, "num_hidden_layers": 1}
    assert of({}, giant).num_parameters > 10**11


def test_a_model_is_whole_again_after_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [{KEY: {"coverage": 0.5, "regime": r, "strategy": s}} for r, s in MODES]
    model = model_of(SHAPE, BATCH | configs[0], sequence_length=LENGTH)
    for config in [*configs, *configs]:
        assert forecast(model, BATCH | config, num_ranks=RANKS) == of(config)
        with monkeypatch.context() as patched:
            patched.setattr("sdp_deepspeed.estimate.forecast.micro_step", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                forecast(model, BATCH | config, num_ranks=RANKS)
    whole = forecast(model, BATCH | {KEY: {"coverage": 1.0}}, num_ranks=RANKS)
    assert whole.flops == of({}).flops


MODES = [("forward", "block"), ("backward", "neuron")]


def test_which_models_classify_images() -> None:
    names = ("resnet", "swin", "vit", "llama", "gpt2", "xyz")
    found = {name: classifies_images({"model_type": name}) for name in names}
    assert [name for name, images in found.items() if images] == ["resnet", "swin", "vit"]


def test_values_may_be_narrower_than_keys() -> None:
    """As in DeepSeek's attention: PyTorch has no fused kernel for it on a CPU, so scores are stored."""
    narrow = SHAPE | {"model_type": "stablelm", "partial_rotary_factor": 0.25}  # 5 columns of keys and 4 of values
    short, long = (of({}, narrow, length) for length in (8, 32))
    assert long.activations > 4 * short.activations
