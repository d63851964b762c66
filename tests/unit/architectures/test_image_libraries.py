"""Models of torchvision, timm 1.0.31 and Diffusers 0.42.1 in all modes, where these are installed or in the folder of
`--torchvision FOLDER`."""

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
from tests.helpers.torchvision_models import MODELS, NUM_CLASSES, SIZE, load

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


TIMM: dict[str, Callable[[Any], nn.Module]] = {
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
def torchvision(pytestconfig: pytest.Config) -> Any:
    torch.manual_seed(0)
    return load(pytestconfig.getoption("--torchvision"))


def check(model: nn.Module, size: int, *, heads_are_cut: bool) -> None:
    model = models.scrambled(model).double().train()
    images = torch.randn(3, 3, size, size, dtype=torch.float64)

    def loss_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        logits = model(images)
        logits = torch.stack(logits).sum(0) if isinstance(logits, tuple) else logits  # of both heads of DeiT
        return nn.functional.cross_entropy(logits, torch.arange(3) % NUM_CLASSES)

    assert len(check_description(model, images, loss_of)) == 4
    branches = proven_branches(model, "neuron")
    uncut = {branch.description.name for branch in branches if branch.uncuttable_reason}
    assert uncut == (set() if heads_are_cut else {"attention"})
    assert flops_per_element(model)


@pytest.mark.parametrize("name", MODELS)
def test_torchvision(torchvision: Any, name: str) -> None:
    check(MODELS[name](torchvision), SIZE, heads_are_cut=name not in ("swin", "swin_v2", "vit"))


@pytest.mark.parametrize("name", TIMM)
def test_timm(torchvision: Any, name: str) -> None:
    pytest.importorskip("timm")
    size = 32 if name.startswith(("convnext", "resnet")) else 12
    model = TIMM[name](importlib.import_module("timm.models"))
    check(model, size, heads_are_cut=name not in ("swin_v2", "vit_norm_over_heads"))


def test_the_diffusion_transformer(torchvision: Any) -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 4, "in_channels": 4, "patch_size": 2}
    options = {"sample_size": 8, "num_embeds_ada_norm": 5, "norm_num_groups": 1}
    model = models.scrambled(diffusers.DiTTransformer2DModel(**sizes, **options)).double().eval()
    images = torch.randn(2, 4, 8, 8, dtype=torch.float64)

    def loss_of(model: Any, images: torch.Tensor) -> torch.Tensor:
        noise = model(images, timestep=torch.tensor([3, 500]), class_labels=torch.tensor([1, 4])).sample
        return nn.functional.mse_loss(noise[:, :4], images)

    assert len(check_description(model, images, loss_of)) == 4
