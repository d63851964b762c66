"""Small models of torchvision, which is not in the tests' extra: a registry's wheel for CUDA does not import beside a
PyTorch for CPUs, and Transformers, which imports it where it is installed, would not either. To run its tests there:

    pip install --no-deps --target FOLDER torchvision==0.28.0
    pytest tests/unit/architectures/test_image_libraries.py --torchvision FOLDER
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

# Of operators of the compiled part, which its Python part asks for when it is imported.
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
SIZE, NUM_CLASSES = 12, 5


def load(folder: str | None) -> Any:
    """`torchvision.models`, from the folder if one is given; the test is skipped where it cannot be imported."""
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", _SCHEMA)
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as problem:
        pytest.skip(f"torchvision: {problem}")


def _vit(models: Any) -> Any:
    sizes = {"image_size": SIZE, "patch_size": 4, "num_layers": 2, "num_heads": 3, "hidden_dim": 12, "mlp_dim": 27}
    return models.VisionTransformer(**sizes, num_classes=NUM_CLASSES)


def _swin(models: Any, *, v2: bool = False) -> Any:
    """The second stage is padded, and its second layer shifts windows."""
    swin = models.swin_transformer
    sizes = {"patch_size": [2, 2], "embed_dim": 12, "depths": [1, 2], "num_heads": [3, 6], "window_size": [2, 2]}
    options = {"mlp_ratio": 2.25, "stochastic_depth_prob": 0.0, "num_classes": NUM_CLASSES}
    if v2:
        options |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer(**sizes, **options)


def _convnext(models: Any) -> Any:
    config = models.convnext.CNBlockConfig
    options = {"stochastic_depth_prob": 0.0, "layer_scale": 0.5, "num_classes": NUM_CLASSES}
    return models.ConvNeXt([config(9, 12, 1), config(12, None, 2)], **options)


def _resnet(models: Any, *, block: str) -> Any:
    """Layers [2, 2, 1, 1], of which the second of two stages is bypassed by an identity."""
    kind = getattr(models.resnet, block)
    return models.ResNet(kind, [2, 2, 1, 1], num_classes=NUM_CLASSES, width_per_group=64)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "convnext": _convnext,
    "resnet": lambda models: _resnet(models, block="BasicBlock"),
    "resnet_bottleneck": lambda models: _resnet(models, block="Bottleneck"),
    "swin": _swin,
    "swin_v2": lambda models: _swin(models, v2=True),
    "vit": _vit,
}
