"""timm's models in all modes, where timm 1.0.31 is installed or in the folder of `--torchvision FOLDER`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import check_description
from sdp_deepspeed.architectures.derivation import flops_per_element
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers import models
from tests.helpers.torchvision_models import load

_VIT: dict[str, Any] = {"img_size": 12, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 2.25}
# The second stage is padded, and its second layer shifts windows.
_SWIN: dict[str, Any] = {
    "img_size": 12,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": (1, 2),
    "num_heads": (3, 6),
    "window_size": 2,
    "mlp_ratio": 2.25,
    "drop_path_rate": 0.0,
}
_CONVNEXT: dict[str, Any] = {"depths": (1, 1, 2, 1), "dims": (6, 9, 12, 12), "ls_init_value": 0.5}


def _resnet(timm: Any, block: str, **options: Any) -> nn.Module:
    return timm.resnet.ResNet(getattr(timm.resnet, block), (2, 2, 1, 1), num_classes=5, **options)


def _vit(timm: Any, **options: Any) -> nn.Module:
    return timm.vision_transformer.VisionTransformer(**_VIT, num_classes=5, **options)


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "convnext": lambda timm: timm.convnext.ConvNeXt(**_CONVNEXT, num_classes=5),
    "convnext_convolutions": lambda timm: timm.convnext.ConvNeXt(**_CONVNEXT, num_classes=5, conv_mlp=True),
    "deit": lambda timm: timm.deit.VisionTransformerDistilled(**_VIT, num_classes=5),
    "resnet": lambda timm: _resnet(timm, "BasicBlock"),
    "resnet_bottleneck": lambda timm: _resnet(timm, "Bottleneck", base_width=32),
    "resnet_stochastic_depth": lambda timm: _resnet(timm, "BasicBlock", drop_path_rate=1e-9),
    "swin": lambda timm: timm.swin_transformer.SwinTransformer(**_SWIN, num_classes=5),
    "swin_v2": lambda timm: timm.swin_transformer_v2.SwinTransformerV2(**_SWIN, num_classes=5),
    "vit": lambda timm: _vit(timm),
    "vit_gates": lambda timm: _vit(timm, mlp_layer=importlib.import_module("timm.layers").SwiGLU),
    "vit_head_norms": lambda timm: _vit(timm, qk_norm=True, init_values=0.5, class_token=False, global_pool="avg"),
    "vit_norm_over_heads": lambda timm: _vit(timm, scale_attn_norm=True),
}


@pytest.fixture
def timm(pytestconfig: pytest.Config) -> Any:
    load(pytestconfig.getoption("--torchvision"))
    pytest.importorskip("timm")
    return importlib.import_module("timm.models")


@pytest.mark.parametrize("name", MODELS)
def test_all_modes(timm: Any, name: str) -> None:
    torch.manual_seed(0)
    model = models.scrambled(MODELS[name](timm)).double().train()
    size = 32 if name.startswith(("convnext", "resnet")) else 12
    images = torch.randn(3, 3, size, size, dtype=torch.float64)

    def loss_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        logits = model(images)
        logits = torch.stack(logits).sum(0) if isinstance(logits, tuple) else logits  # of both heads of DeiT
        return nn.functional.cross_entropy(logits, torch.arange(3))

    assert len(check_description(model, images, loss_of)) == 4
    branches = proven_branches(model, "neuron")
    uncut = {branch.description.name for branch in branches if branch.uncuttable_reason}
    assert uncut == ({"attention"} if name in ("swin_v2", "vit_norm_over_heads") else set())
    assert flops_per_element(model)
