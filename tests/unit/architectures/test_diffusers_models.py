"""Diffusers' DiT in all modes, where Diffusers 0.42.1 is installed or in the folder of `--torchvision FOLDER`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import check_description
from tests.helpers import models
from tests.helpers.torchvision_models import load


def test_the_diffusion_transformer(pytestconfig: pytest.Config) -> None:
    load(pytestconfig.getoption("--torchvision"))
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 4, "in_channels": 4, "patch_size": 2}
    options = {"sample_size": 8, "num_embeds_ada_norm": 5, "norm_num_groups": 1}
    model = models.scrambled(diffusers.DiTTransformer2DModel(**sizes, **options)).double().eval()
    images = torch.randn(2, 4, 8, 8, dtype=torch.float64)

    def loss_of(model: Any, images: torch.Tensor) -> torch.Tensor:
        noise = model(images, timestep=torch.tensor([3, 500]), class_labels=torch.tensor([1, 4])).sample
        return nn.functional.mse_loss(noise[:, :4], images)

    assert len(check_description(model, images, loss_of)) == 4
