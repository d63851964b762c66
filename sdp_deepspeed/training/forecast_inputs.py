"""Models without data for a forecast, and what they are called with: tokens or images."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
)

from sdp_deepspeed.architectures.image_flops import image_shape, takes_images
from sdp_deepspeed.training.model import build_model

# Model types of ours, by the room that tells Transformers of them when it is imported. It stands above this one.
_OURS = {"sdp_small_image_resnet": "sdp_deepspeed.architectures.small_image_resnet"}


def classifies_images(shape: Mapping[str, Any]) -> bool:
    """Whether a Transformers config with `model_type` is of an image classifier."""
    if shape["model_type"] in _OURS:
        import_module(_OURS[shape["model_type"]])
    try:
        kind = type(AutoConfig.for_model(shape["model_type"]))
    except ValueError:  # `build_model` says it
        return False
    return kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def without_data(
    shape: Mapping[str, Any], fake: FakeTensorMode, *, dtype: torch.dtype, gradient_checkpointing: bool
) -> nn.Module:
    """A model of fake tensors, on the CPU by what they say.

    Args:
        shape: a Transformers config with `model_type`, of a causal language model or an image classifier.
        fake: must take tensors that are not fake.
    """
    options: dict[str, Any] = {"seed": 0, "gradient_checkpointing": gradient_checkpointing, "dtype": dtype}
    if not classifies_images(shape):
        with fake:
            return build_model(shape, **options)
    with torch.device("meta"):  # some of these read tensors while they are built, which fake ones do not allow
        model = build_model(shape, auto_class=AutoModelForImageClassification, **options)
    with fake:
        return model.to_empty(device="cpu")


def inputs_of(model: nn.Module, rows: int, sequence_length: int | None) -> dict[str, Any]:
    """What a micro-batch of `rows` calls the model with; `sequence_length` is None for images."""
    if not takes_images(model):
        tokens = torch.zeros((rows, sequence_length or 0), dtype=torch.long, device="cpu")
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}
    dtype = next(model.parameters()).dtype
    images = torch.zeros((rows, *image_shape(model)), dtype=dtype, device="cpu")
    return {"pixel_values": images, "labels": torch.zeros(rows, dtype=torch.long, device="cpu")}
