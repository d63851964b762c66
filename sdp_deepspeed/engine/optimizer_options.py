"""Options of the sharded optimizer, read from DeepSpeed's engine."""

from __future__ import annotations

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase

from sdp_deepspeed.parallel.step_options import StepOptions


def step_options(engine: DeepSpeedEngine, stage: int) -> StepOptions:
    """Options of `ShardedOptimizer` at a ZeRO stage."""
    model_dtype, accumulation_dtype = engine.get_data_types()
    zero = engine._config.zero_config
    has_size = "reduce_bucket_size" in zero.model_fields_set
    offload = zero.offload_optimizer
    sums_in_fp32 = accumulation_dtype == torch.float32 and model_dtype != torch.float32
    offloads = offload is not None and offload.device == "cpu"
    return StepOptions(
        stage=2 if stage == 2 else 1,  # 0 sends the same as 1, and has the same results
        clip=float(engine.gradient_clipping() or 0),
        clips_updates=stage > 0 and not uses_bf16_optimizer(engine, stage),
        bucket_size=int(engine.zero_reduce_bucket_size()) if has_size else None,
        overlap=bool(engine.zero_overlap_comm()),
        gradient_dtype=torch.float32 if sums_in_fp32 else None,
        wire_dtype=engine.communication_data_type,
        offload=offloads,
        pin_memory=offload is not None and bool(offload.pin_memory),
    )


def uses_bf16_optimizer(engine: DeepSpeedEngine, stage: int) -> bool:
    """Whether DeepSpeed would build its `BF16_Optimizer`, not that of ZeRO stages 1 and 2."""
    is_stage_1 = stage == 1 and not engine.zero_cpu_offload()
    return is_stage_1 and engine.get_data_types() == (torch.bfloat16, torch.float32)


def check_bucket_size(engine: DeepSpeedEngine) -> None:
    """Raise AssertionError where DeepSpeed does: ZeRO stages 1 and 2 need an even `allgather_bucket_size`, which has no
    effect here."""
    size, stage = engine.zero_allgather_bucket_size(), int(engine.zero_optimization_stage())
    if size % 2 and stage > 0 and not uses_bf16_optimizer(engine, stage):
        raise AssertionError(
            f"zero_optimization.allgather_bucket_size: got {size}, which must be a multiple of 2 "
            "(nccl_start_alignment_factor); use an even number"
        )


def skips_overflow(engine: DeepSpeedEngine) -> bool:
    """Whether steps with non-finite gradients are skipped, as in DeepSpeed: in fp16; in bf16 if the config says so; in
    fp32 only under ZeRO."""
    if engine.bfloat16_enabled():
        return bool(engine._config.bfloat16_config.check_grad_overflow)
    under_zero = int(engine.zero_optimization_stage()) > 0 and bool(engine.zero_compute_grad_norm())
    return under_zero or bool(engine.fp16_enabled())


def loss_scaler(engine: DeepSpeedEngine) -> LossScalerBase:
    """DeepSpeed's loss scaler: static, dynamic, or 1 without fp16."""
    return CreateLossScaler(
        engine.get_data_types()[0],
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )
