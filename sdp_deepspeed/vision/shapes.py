"""A model's JSON made whole by the data, tried without storage before anything starts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification

from sdp_deepspeed.training.model import build_model

NUM_IMAGES = 2  # batch norm wants more than one


def full_shape(shape: Mapping[str, Any], names: Sequence[str], image_size: int) -> dict[str, Any]:
    """With what follows from the data: classes, and the size of the images where the model type knows one.

    Args:
        shape: a Transformers config with `model_type`.
        names: of the classes.
        image_size: S, in pixels.

    Raises:
        ValueError: the JSON says something else.
    """
    given = shape.get("num_labels")
    if given is not None and given != len(names):
        raise ValueError(f"--model: num_labels is {given}, the data have {len(names)} classes: leave it out")
    full = {name: value for name, value in shape.items() if name != "num_labels"}
    full |= {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    if "image_size" in _known_keys(shape["model_type"]):
        side = full.setdefault("image_size", image_size)
        if side not in (image_size, [image_size, image_size]):
            raise ValueError(f"--model: image_size is {side}, the images have {image_size}: leave it out")
    return full


def _known_keys(model_type: str) -> Mapping[str, Any]:
    try:
        keys: dict[str, Any] = AutoConfig.for_model(model_type).to_dict()
    except ValueError:
        return {}  # `build_model` says it
    return keys


def try_model(shape: Mapping[str, Any], image_size: int) -> None:
    """Build it without storage, and show it images.

    Raises:
        ValueError: it cannot be built, or cannot take images of this size.
    """
    model = model_without_storage(shape)
    try:
        model(pixel_values=some_images(image_size))
    except Exception as error:  # of any kind: what Transformers or an operator says of a wrong size
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(
            f"--model: {shape['model_type']!r} cannot take 3 x {image_size} x {image_size} images: {reason}; "
            "change patch_size, strides or number of stages, or image_size in --data"
        ) from None


def model_without_storage(shape: Mapping[str, Any]) -> nn.Module:
    """On the meta device; ValueError if it cannot be built. Some models read tensors while they are built, which
    fake ones do not allow."""
    with torch.device("meta"):
        return build_model(shape, seed=0, auto_class=AutoModelForImageClassification)


def some_images(image_size: int) -> torch.Tensor:
    """[NUM_IMAGES, 3, S, S] on the meta device."""
    return torch.empty(NUM_IMAGES, 3, image_size, image_size, dtype=torch.float32, device="meta")
