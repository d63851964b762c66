"""The small stem, widening, and what Transformers' automatic classes make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from sdp_deepspeed.small_image_resnet import (
    SmallImageResNetConfig,
    SmallImageResNetForImageClassification,
    SmallImageResNetModel,
)

SMALL: dict[str, Any] = {"embedding_size": 4, "stage_sizes": [4, 8], "depths": [1, 2], "num_labels": 3}


def test_an_image_keeps_its_size_until_the_second_stage() -> None:
    model = SmallImageResNetModel(SmallImageResNetConfig(**SMALL))
    output = model(torch.zeros(2, 3, 8, 8), output_hidden_states=True)
    assert [tuple(hidden.shape) for hidden in output.hidden_states] == [(2, 4, 8, 8), (2, 4, 8, 8), (2, 8, 4, 4)]


def test_it_is_a_resnet_18_by_default() -> None:
    with torch.device("meta"):
        model = SmallImageResNetForImageClassification(SmallImageResNetConfig(num_labels=10))
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962, "the usual one for CIFAR-10"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"width_factor": 0}, "width_factor: got 0, expected at least 1"),
        ({"hidden_sizes": [8, 16]}, "hidden_sizes: got .8, 16., expected stage_sizes . width_factor .4, 8."),
        ({"depths": [1]}, "expected one of each per stage"),
    ],
)
def test_mistakes(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoConfig.for_model("sdp_small_image_resnet", **SMALL | wrong)


def test_saved_and_loaded(tmp_path: Path) -> None:
    config = AutoConfig.for_model("sdp_small_image_resnet", **SMALL, width_factor=2)
    model = AutoModelForImageClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert type(loaded) is SmallImageResNetForImageClassification
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, model(images).logits)
        body = AutoModel.from_pretrained(tmp_path).eval()
        assert torch.equal(body(images).pooler_output, model.resnet(images).pooler_output)
