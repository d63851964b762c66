"""A model's JSON that follows the data, and models that cannot take them."""

from __future__ import annotations

from typing import Any

import pytest

import sdp_deepspeed.vision  # noqa: F401  registers a model type
from sdp_deepspeed.vision.shapes import full_shape, model_without_storage, try_model

NAMES = ["zero", "one"]
VIT = {"model_type": "vit", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_classes_and_size_come_from_the_data() -> None:
    shape = full_shape(VIT | {"patch_size": 4, "num_labels": 2}, NAMES, 8)
    assert (shape["id2label"], shape["label2id"]) == ({0: "zero", 1: "one"}, {"zero": 0, "one": 1})
    assert (shape["image_size"], "num_labels" in shape) == (8, False)
    model: Any = model_without_storage(shape)
    assert (model.config.num_labels, model.classifier.weight.is_meta) == (2, True)
    try_model(shape, 8)
    assert "image_size" not in full_shape({"model_type": "resnet"}, NAMES, 8)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (VIT | {"num_labels": 3}, "num_labels is 3, the data have 2 classes: leave it out"),
        (VIT | {"image_size": 9}, "image_size is 9, the images have 8: leave it out"),
        (VIT | {"image_size": 8, "patch_size": 16}, "'vit' "),
        ({"model_type": "resnet", "num_channels": 1}, "'resnet' cannot take 3 x 8 x 8 images: "),
        ({"model_type": "llama"}, "Transformers cannot build 'llama' from this JSON"),
        ({"model_type": "resnett"}, "Transformers cannot build 'resnett' from this JSON"),
    ],
)
def test_models_that_do_not_fit(shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r"^--model: ") as error:
        try_model(full_shape(shape, NAMES, 8), 8)
    assert words in str(error.value)
