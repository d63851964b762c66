"""Runs in fp16 on a CPU.

CPUs have no fp16 in DeepSpeed's eyes, so its accelerator's answer is overridden; PyTorch computes fp16 there all right.
"""

from __future__ import annotations

from typing import Any

from deepspeed.accelerator import get_accelerator

from tests.helpers.training import sgd

DYNAMIC = {"initial_scale_power": 6, "loss_scale_window": 2, "hysteresis": 2, "min_loss_scale": 8}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.1, "warmup_num_steps": 30}}


def settings_of(stage: int, fp16: dict[str, Any], **block: Any) -> dict[str, Any]:
    get_accelerator().is_fp16_supported = lambda: True
    settings = sgd(stage=stage, clip=0.5, **({"check_agreement": True} | block))
    settings |= {"fp16": {"enabled": True} | fp16, "scheduler": WARMUP, "zero_allow_untested_optimizer": True}
    settings["zero_optimization"]["reduce_bucket_size"] = 2000
    return settings
