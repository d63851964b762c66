"""Runs that are saved and resumed, with a schedule, and what must be the same afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sdp_deepspeed.checkpoint.files import LOCK, README
from tests.helpers.models import config

WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}}


def settings_of(stage: int = 1, precision: str = "fp32", **block: Any) -> dict[str, Any]:
    result = config(**({"holders": 1} | block)) | {"zero_optimization": {"stage": stage}, "scheduler": WARMUP}
    if precision != "fp32":
        result |= {"bf16": {"enabled": True}}
    if precision == "bf16+fp32":
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def stepped(engine: Any) -> dict[str, torch.Tensor]:
    """Masters, or views of the weights, and the optimizer's state: what this rank steps."""
    optimizer = engine.optimizer.optimizer
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    result = {f"stepped.{i}": tensor.detach().clone() for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        result |= {f"{i}.{key}": torch.as_tensor(value).clone() for key, value in optimizer.state[tensor].items()}
    return result


def names_in(folder: Path) -> list[str]:
    """All but the lock, which is there while the process is, and the README."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (LOCK, README))
