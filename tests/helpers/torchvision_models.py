"""Small models of torchvision, which is not in the tests' extra: a registry's wheel for CUDA does not import beside a
PyTorch for CPUs, and Transformers, which imports it where it is installed, would not either. To run its tests there:

    pip install --no-deps --target FOLDER torchvision==0.28.0
    pytest tests/unit/architectures/test_torchvision_models.py --torchvision FOLDER
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
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


class Classifier(nn.Module):
    """One of its models, called as one of Transformers."""

    main_input_name = "pixel_values"

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = SimpleNamespace(image_size=SIZE, num_labels=NUM_CLASSES)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.model(pixel_values)
        return SimpleNamespace(logits=logits, loss=nn.functional.cross_entropy(logits, labels))


def _vit(models: Any, **options: Any) -> Any:
    sizes = {"image_size": SIZE, "patch_size": 4, "num_layers": 2, "num_heads": 3, "hidden_dim": 12, "mlp_dim": 27}
    return models.VisionTransformer(**sizes, num_classes=NUM_CLASSES, **options)


def _swin(models: Any, *, v2: bool = False, **options: Any) -> Any:
    """The second stage is padded, and its second layer shifts windows."""
    swin = models.swin_transformer
    sizes = {"patch_size": [2, 2], "embed_dim": 12, "depths": [1, 2], "num_heads": [3, 6], "window_size": [2, 2]}
    if v2:
        options |= {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer(**sizes, **{"mlp_ratio": 2.25, "stochastic_depth_prob": 0.0, **options}, num_classes=5)


def _convnext(models: Any, **options: Any) -> Any:
    config = models.convnext.CNBlockConfig
    given = {"stochastic_depth_prob": 0.0, "layer_scale": 0.5, **options}
    return models.ConvNeXt([config(9, 12, 1), config(12, None, 2)], num_classes=NUM_CLASSES, **given)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "convnext": _convnext,
    "swin": _swin,
    "swin_v2": lambda models, **options: _swin(models, v2=True, **options),
    "vit": _vit,
}
