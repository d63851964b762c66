"""The support table: what a config can ask for under DeepSpeed, and whether it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.support.block import BLOCK
from sdp_deepspeed.support.conditions import (
    at_stages,
    autocasts_below_bf16,
    clips_without_norm,
    differs,
    equals,
    has_device,
    is_above_one,
    is_enabled,
    is_on,
    is_present,
    is_unknown_optimizer,
    overlaps_unmanaged,
    sums_in_fp32,
    sums_in_third_dtype,
)
from sdp_deepspeed.support.optimizers import ELEMENTWISE_OPTIMIZERS, WHOLE_TENSOR_OPTIMIZERS
from sdp_deepspeed.support.rows import Row, hint, lookup, normalized, refused, works

_ZERO = "zero_optimization"
_AVERAGE = "gradients are averaged over their holders by the exchange"
_PACKS = "the exchange packs what it sends"
_MASTERS = "masters and optimizer state are kept in fp32"
_STAGE_3 = "it needs stage 3"
_ALLOW = f"{KEY}.allow_optimizer"

_PRECISION = (
    works("fp32", ""),
    works("bf16", "bf16.enabled", True),
    works("bf16, steps skipped on overflow", "bf16.check_grad_overflow", True),
    hint("bf16, immediate gradient update", "bf16.immediate_grad_update", True, is_on, _PACKS),
    refused("bf16 master weights", "bf16.bf16_master_weights_and_grads", True, is_on, _MASTERS),
    refused("bf16 optimizer state", "bf16.bf16_optimizer_states", True, is_on, _MASTERS),
    works("fp16, dynamic loss scale", "fp16.enabled", True),
    works("fp16, static loss scale", "fp16.loss_scale", 128),
    refused("fp16 master weights", "fp16.fp16_master_weights_and_grads", True, is_on, _MASTERS),
    works("torch autocast in bf16", "torch_autocast", {"enabled": True, "dtype": "bfloat16"}),
    refused(
        "torch autocast in another dtype",
        "torch_autocast",
        {"enabled": True, "dtype": "float16"},
        autocasts_below_bf16,
        'fp16 needs a gradient scaler; set torch_autocast.dtype to "bfloat16"',
    ),
    hint(
        "modules whose gradients autocast sends in bf16",
        "torch_autocast.lower_precision_safe_modules",
        ["torch.nn.Linear"],
        is_present,
        "communication_data_type decides for all",
    ),
    works("fp32 gradient sums, stages 1 and 2", "data_types.grad_accum_dtype", "fp32"),
    refused(
        "fp32 gradient sums, stage 0",
        "data_types.grad_accum_dtype",
        "fp32",
        at_stages(sums_in_fp32, 0),
        "DeepSpeed refuses this pair too; use stage 1",
    ),
    refused(
        "gradient sums below the weights' precision",
        "data_types.grad_accum_dtype",
        "fp16",
        sums_in_third_dtype,
        "use fp32, or the dtype of the weights",
    ),
    works("dtype of gradients on the wire", "communication_data_type", "fp32"),
)

_ZERO_ROWS = (
    works("ZeRO stage 0", f"{_ZERO}.stage", 0),
    works("ZeRO stage 1", f"{_ZERO}.stage", 1),
    works("ZeRO stage 2", f"{_ZERO}.stage", 2),
    refused("ZeRO stage 3", f"{_ZERO}.stage", 3, equals(3), "it shards what subnetworks hold; use stage 1 or 2"),
    works("overlap of communication", f"{_ZERO}.overlap_comm", True),
    works("size of gradient buckets", f"{_ZERO}.reduce_bucket_size", 1000),
    works("size of weight buckets", f"{_ZERO}.allgather_bucket_size", 1000),
    works("step without gradient norm", f"{_ZERO}.compute_grad_norm", False),
    refused(
        "no gradient norm, with clipping",
        f"{_ZERO}.compute_grad_norm",
        False,
        clips_without_norm,
        "gradient_clipping must be 0",
    ),
    works("optimizer in host memory, stages 1 and 2", f"{_ZERO}.offload_optimizer", {"device": "cpu"}),
    works("optimizer in host memory (old key)", f"{_ZERO}.cpu_offload", True),
    refused(
        "optimizer in host memory, stage 0",
        f"{_ZERO}.offload_optimizer",
        {"device": "cpu"},
        at_stages(has_device("cpu"), 0),
        "DeepSpeed offloads at stages 1 and 2; use stage 1",
    ),
    refused("optimizer on NVMe", f"{_ZERO}.offload_optimizer", {"device": "nvme"}, has_device("nvme"), 'use "cpu"'),
    refused("SuperOffload", f"{_ZERO}.offload_optimizer.super_offload", True, is_on, _STAGE_3),
    refused("offload of parameters", f"{_ZERO}.offload_param", {"device": "cpu"}, has_device("cpu", "nvme"), _STAGE_3),
    refused("offload of parameters (old key)", f"{_ZERO}.cpu_offload_param", True, is_on, _STAGE_3),
    refused("ZenFlow", f"{_ZERO}.zenflow", {"topk_ratio": 0.1}, is_present, "it steps parts of a gradient by itself"),
    refused("hierarchical partitions (ZeRO++)", f"{_ZERO}.zero_hpz_partition_size", 2, is_above_one, _STAGE_3),
    refused("quantized weights (ZeRO++)", f"{_ZERO}.zero_quantized_weights", True, is_on, _STAGE_3),
    refused("quantized frozen weights (ZeRO++)", f"{_ZERO}.zero_quantized_nontrainable_weights", True, is_on, _STAGE_3),
    refused("quantized gradients (ZeRO++)", f"{_ZERO}.zero_quantized_gradients", True, is_on, _STAGE_3),
    refused(
        "error for unused parameters",
        f"{_ZERO}.ignore_unused_parameters",
        False,
        equals(False),
        "a missing gradient counts as zeros",
    ),
    refused("old ZeRO stage 1", f"{_ZERO}.legacy_stage1", True, is_on, "DeepSpeed has removed it"),
    hint("elastic checkpoints", f"{_ZERO}.elastic_checkpoint", True, is_on, "every checkpoint resumes on any layout"),
    refused(
        "masters from 16-bit weights", f"{_ZERO}.load_from_fp32_weights", False, equals(False), "they are saved in fp32"
    ),
    hint("contiguous gradients", f"{_ZERO}.contiguous_gradients", False, equals(False), _PACKS),
    hint("all-reduce in place of reduce-scatter", f"{_ZERO}.reduce_scatter", False, equals(False), _AVERAGE),
    hint("buckets of many ranks", f"{_ZERO}.use_multi_rank_bucket_allreduce", False, equals(False), _AVERAGE),
    hint("broadcasts in place of all-gathers", f"{_ZERO}.allgather_partitions", False, equals(False), _PACKS),
    hint(
        "round-robin gradients", f"{_ZERO}.round_robin_gradients", True, is_on, "every unit is spread over its holders"
    ),
    hint("aligned parameters", f"{_ZERO}.parameter_alignment", True, is_on, "each has storage of its own"),
)

_REST = (
    refused("prescaled gradients", "prescale_gradients", True, is_on, _AVERAGE),
    refused("predivided gradients", "gradient_predivide_factor", 2.0, differs(1), _AVERAGE),
    refused("sum of gradients", "gradient_allreduce_op", "sum", differs("mean"), _AVERAGE),
    works("clipping by the dense gradient's norm", "gradient_clipping", 0.5),
    works("gradient accumulation by the engine", "gradient_accumulation_steps", 2),
    works("gradient accumulation by the caller", "managed_gradient_accumulation", False),
    refused(
        "accumulation by the caller, overlap, stages 0 and 1",
        "managed_gradient_accumulation",
        False,
        at_stages(overlaps_unmanaged, 0, 1),
        "DeepSpeed refuses this too; use stage 2",
    ),
    works("activation checkpointing (Transformers', DeepSpeed's)", "activation_checkpointing", {"profile": False}),
    works("torch.compile of the model, its layers, or by engine.compile()", ""),
    works("model without storage (`sdp_deepspeed.Init`, or the meta device)", ""),
    works("synchronized batch norm (`SyncBatchNorm`), over the holders of a unit", ""),
    Row(
        "synchronized batch norm at stage 2, or where neurons are cut",
        "",
        "refused",
        note="ranks would wait for each other in backward, and channels have holders of their own",
    ),
    works("flops profiler", "flops_profiler", {"enabled": True}),
    works("wall-clock breakdown", "wall_clock_breakdown", True),
    works("comms logger", "comms_logger", {"enabled": True}),
    works("tensor parallelism (AutoTP)", "tensor_parallel.autotp_size", 2),
    Row("tensor parallelism (a user's `mpu` object)", "", "works"),
    Row("tensor parallelism of GPT-2, which AutoTP does not know", "", "refused"),
    Row(
        "tensor parallelism of branches whose shards would compute something else",
        "",
        "refused",
        note="engine/README.md names the families; remove tensor_parallel, or give a partition_config",
    ),
    Row(
        "tensor parallelism of a model without storage",
        "",
        "refused",
        note="it divides weights that are there; build the model without `Init`",
    ),
    Row("stage 2 with a vocabulary that tensor-parallel ranks do not divide", "", "refused"),
    refused("sequence parallelism", "sequence_parallel_size", 2, is_above_one),
    refused("expert parallelism", "expert_parallel", {"enabled": True}, is_enabled),
    Row("pipeline modules", "", "refused"),
    refused("hybrid engine", "hybrid_engine", {"enabled": True}, is_enabled),
    refused("DeepCompile", "compile.deepcompile", True, is_on),
    refused("data efficiency (curriculum, random-LTD)", "data_efficiency", {"enabled": True}, is_enabled),
    refused("autotuning", "autotuning", {"enabled": True}, is_enabled, "it tries stages and sizes of its own"),
    works("optimizers of single elements", "optimizer.type", "AdamW"),
    works("optimizers of whole tensors: Muon, Adafactor, Lamb", "optimizer.type", "Adafactor"),
    Row(
        "optimizers of whole tensors, of what neuron units or tensor-parallel ranks cut",
        "",
        "refused",
        note='no rank has all of a tensor; use the block strategy, or `"use_muon": False` for those param groups',
    ),
    refused(
        "Muon of single attention heads",
        "optimizer.params.per_head_muon",
        True,
        is_on,
        "the optimizer's own step takes whole matrices; remove the key",
    ),
    refused(
        "an unknown optimizer",
        "optimizer.type",
        "OneBitAdam",
        is_unknown_optimizer,
        f"use one of {', '.join(ELEMENTWISE_OPTIMIZERS + WHOLE_TENSOR_OPTIMIZERS)}, or set {_ALLOW}: true if yours "
        'updates each element by itself, "whole_tensors" if each tensor',
    ),
    hint("permission for untested optimizers", "zero_allow_untested_optimizer", True, None, f"{_ALLOW} decides"),
    hint("legacy fusion in the optimizer", "optimizer.legacy_fusion", True, is_on, _MASTERS),
    works("checkpoints that the other host resumes", ""),
    works("checkpoints in universal format", "checkpoint.load_universal", True),
    refused("checkpoints on node-local disks", "checkpoint.use_node_local_storage", True, is_on, "use a shared folder"),
    refused(
        "checkpoint writers",
        "checkpoint.writer",
        {"type": "FAST"},
        is_present,
        "checkpoints have a format of their own",
    ),
    refused(
        "checkpoints through DataStates",
        "datastates_ckpt",
        {"host_cache_size": 1},
        differs(False),
        "as checkpoint.writer",
    ),
    hint(
        "validation of checkpoint tags", "checkpoint.tag_validation", "FAIL", None, "different tags are always an error"
    ),
)

TABLE: tuple[Row, ...] = BLOCK + _ZERO_ROWS + _PRECISION + _REST


def matching_rows(config: SubnetworkConfig, ds_config: Mapping[str, Any]) -> list[tuple[Row, Any]]:
    """Rows of what is refused or has no effect that a config asks for, each with its value.

    Args:
        config: the parsed block.
        ds_config: the whole DeepSpeed config, loaded.
    """
    tree = normalized(ds_config, config.model_dump())
    values = ((row, lookup(tree, row.path)) for row in TABLE)
    return [(row, value) for row, value in values if row.applies is not None and row.applies(value, tree)]
