"""Options of the sharded optimizer, read from DeepSpeed's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase

if TYPE_CHECKING:
    from sdp_deepspeed.engine.engine import SubnetworkEngine


def sharded_options(engine: SubnetworkEngine) -> dict[str, Any]:
    """Keyword arguments of `ShardedOptimizer`."""
    model_dtype, accumulation_dtype = engine.get_data_types()
    zero = engine._config.zero_config
    has_size = "reduce_bucket_size" in zero.model_fields_set
    offload = zero.offload_optimizer
    sums_in_fp32 = accumulation_dtype == torch.float32 and model_dtype != torch.float32
    stage = int(engine.zero_optimization_stage())
    offloads = offload is not None and offload.device == "cpu"
    in_bf16_optimizer = stage == 1 and model_dtype == torch.bfloat16 and sums_in_fp32 and not offloads
    return {
        "stage": max(1, stage),  # 0 sends the same as 1, and has the same results
        "clip": float(engine.gradient_clipping() or 0),
        "clips_updates": stage > 0 and not in_bf16_optimizer,
        "bucket_size": int(engine.zero_reduce_bucket_size()) if has_size else None,
        "overlap": bool(engine.zero_overlap_comm()),
        "gradient_dtype": torch.float32 if sums_in_fp32 else None,
        "wire_dtype": engine.communication_data_type,
        "offload": offloads,
        "pin_memory": offload is not None and offload.pin_memory,
    }


def skips_overflow(engine: SubnetworkEngine) -> bool:
    """Whether steps with non-finite gradients are skipped, as in DeepSpeed: in fp16; in bf16 if the config says so; in
    fp32 only under ZeRO."""
    if engine.bfloat16_enabled():
        return bool(engine._config.bfloat16_config.check_grad_overflow)
    under_zero = int(engine.zero_optimization_stage()) > 0 and bool(engine.zero_compute_grad_norm())
    return under_zero or bool(engine.fp16_enabled())


def loss_scaler(engine: SubnetworkEngine) -> LossScalerBase:
    """DeepSpeed's loss scaler: static, dynamic, or 1 without fp16."""
    return CreateLossScaler(
        engine.get_data_types()[0],
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )
