"""Small ResNets for tests in one process; those of the oracle are in more_models.py."""

from __future__ import annotations

from typing import Any

import torch
from transformers import ResNetConfig, ResNetForImageClassification

from tests.helpers import models

KINDS = ("basic", "bottleneck")
SIZES: dict[str, Any] = {"embedding_size": 6, "hidden_sizes": [12, 16], "depths": [2, 3], "num_labels": 5}


def build(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(**SIZES | {"layer_type": kind} | options))
    model.config.image_size = 16
    return models.scrambled(model).train()
