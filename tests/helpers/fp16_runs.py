"""Runs in fp16 on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from deepspeed.accelerator import get_accelerator

from tests.helpers import training

DYNAMIC = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 8}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 30}}


def fp16_is_supported() -> AbstractContextManager[Any]:
    """DeepSpeed has no fp16 on CPUs, because it is slow there; PyTorch computes it all the same."""
    return mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True)


def engine_of(settings: Mapping[str, Any]) -> Any:
    with fp16_is_supported():
        return training.engine_of(settings)


def settings_of(stage: int, fp16: dict[str, Any], **block: Any) -> dict[str, Any]:
    settings = training.sgd(stage=stage, clip=0.5, **({"check_agreement": True} | block))
    settings |= {"fp16": {"enabled": True} | fp16, "scheduler": WARMUP, "zero_allow_untested_optimizer": True}
    settings["zero_optimization"]["reduce_bucket_size"] = 2000
    return settings
