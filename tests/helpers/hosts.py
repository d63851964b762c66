"""What scripts for Transformers' Trainer and Accelerate have in common: rows, DeepSpeed's config, what they wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.helpers.models import LENGTH, VOCABULARY

Row = dict[str, torch.Tensor]


def rows(num: int, *, ragged: bool = False) -> list[Row]:
    """The same on each rank.

    Args:
        ragged: later rows have fewer labels, the last one a single one.
    """
    generator = torch.Generator().manual_seed(3)
    result = []
    for index in range(num):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        if ragged:
            labels[2 + (num - 1 - index) * (LENGTH - 2) // num :] = -100
        result.append({"input_ids": tokens, "labels": labels})
    return result


def deepspeed_config(block: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """As people write it for these hosts, with "auto" wherever that is possible; without an optimizer."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"},
        "subnetwork_data_parallel": {"coverage": 0.5, **block},
        **more,
    }


@torch.no_grad()
def mean_loss(model: Any, data: Sequence[Row]) -> float:
    """Of a plain model, row by row."""
    model.eval()
    return sum(float(model(**batch_of(row)).loss) for row in data) / len(data)


def batch_of(row: Row) -> Row:
    return {name: value[None] for name, value in row.items()}


def loaded(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model
