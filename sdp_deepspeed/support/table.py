"""The support table: what a config can ask for, and whether it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.support.conditions import (
    at_stages,
    autocasts_below_bf16,
    clips_without_norm,
    differs,
    equals,
    fetches_in_backward_regime,
    has_device,
    is_above_one,
    is_enabled,
    is_on,
    is_present,
    is_unknown_optimizer,
    overlaps_unmanaged,
    scales_backward_branches,
    sums_in_fp32,
    sums_in_third_dtype,
)
from sdp_deepspeed.support.optimizers import ELEMENTWISE_OPTIMIZERS, WHOLE_TENSOR_OPTIMIZERS
from sdp_deepspeed.support.rows import Condition, Row, lookup, normalized


def _works(what: str, path: str, example: Any = None) -> Row:
    return Row(what, path, "works", example)


def _refused(what: str, path: str, example: Any, applies: Condition, note: str = "") -> Row:
    return Row(what, path, "refused", example, applies, note)


def _hint(what: str, path: str, example: Any, applies: Condition | None, note: str) -> Row:
    return Row(what, path, "no effect", example, applies, note)


_ZERO = "zero_optimization"
_AVERAGE = "gradients are averaged over their holders by the exchange"
_PACKS = "the exchange packs what it sends"
_MASTERS = "masters and optimizer state are kept in fp32"
_STAGE_3 = "it needs stage 3"
_ALLOW = f"{KEY}.allow_optimizer"

_BLOCK = (
    _works("forward regime", f"{KEY}.regime", "forward"),
    _works("backward regime", f"{KEY}.regime", "backward"),
    _works("block strategy", f"{KEY}.strategy", "block"),
    _works("neuron strategy", f"{KEY}.strategy", "neuron"),
    _works("strategy by part", f"{KEY}.strategy", {"attention": "neuron", "mlp": "block"}),
    _works("coverage over depth and by name", f"{KEY}.coverage", [{"units": "mlp", "coverage": 0.5}]),
    _works(
        "coverage over time; no compiled modules",
        f"{KEY}.schedule",
        [{"until_step": 1, "coverage": 0.5}, {"coverage": 1.0}],
    ),
    _works("another assignment from time to time, under the same conditions", f"{KEY}.redraw_interval", 100),
    _works("groups of neurons", f"{KEY}.neuron_groups", 4),
    _works("scaled dense branches, forward regime", f"{KEY}.dense_branch_scale", "coverage"),
    _refused(
        "scaled dense branches, backward regime",
        f"{KEY}.dense_branch_scale",
        "coverage",
        scales_backward_branches,
        "its workers train the whole model, which needs no scale; remove the key",
    ),
    _works("learning rates by coverage", f"{KEY}.lr_by_coverage", "sqrt"),
    Row(
        "learning rates by coverage of an optimizer whose steps no lr decides",
        "",
        "refused",
        note="lr=None, relative_step, PyTorch's Adafactor: there is nothing to multiply; remove the key",
    ),
    _works("dense model in evaluation: resident, prefetched, streamed", f"{KEY}.evaluation", "prefetch"),
    _refused(
        "ways of the dense model, backward regime",
        f"{KEY}.evaluation",
        "prefetch",
        fetches_in_backward_regime,
        "every rank has the dense model; remove the key",
    ),
    _works("one subnetwork for each data-parallel rank", f"{KEY}.subnetworks", "auto"),
    _works("replicas of subnetworks", f"{KEY}.subnetworks", 1),
)

_PRECISION = (
    _works("fp32", ""),
    _works("bf16", "bf16.enabled", True),
    _works("bf16, steps skipped on overflow", "bf16.check_grad_overflow", True),
    _hint("bf16, immediate gradient update", "bf16.immediate_grad_update", True, is_on, _PACKS),
    _refused("bf16 master weights", "bf16.bf16_master_weights_and_grads", True, is_on, _MASTERS),
    _refused("bf16 optimizer state", "bf16.bf16_optimizer_states", True, is_on, _MASTERS),
    _works("fp16, dynamic loss scale", "fp16.enabled", True),
    _works("fp16, static loss scale", "fp16.loss_scale", 128),
    _refused("fp16 master weights", "fp16.fp16_master_weights_and_grads", True, is_on, _MASTERS),
    _works("torch autocast in bf16", "torch_autocast", {"enabled": True, "dtype": "bfloat16"}),
    _refused(
        "torch autocast in another dtype",
        "torch_autocast",
        {"enabled": True, "dtype": "float16"},
        autocasts_below_bf16,
        'fp16 needs a gradient scaler; set torch_autocast.dtype to "bfloat16"',
    ),
    _hint(
        "modules whose gradients autocast sends in bf16",
        "torch_autocast.lower_precision_safe_modules",
        ["torch.nn.Linear"],
        is_present,
        "communication_data_type decides for all",
    ),
    _works("fp32 gradient sums, stages 1 and 2", "data_types.grad_accum_dtype", "fp32"),
    _refused(
        "fp32 gradient sums, stage 0",
        "data_types.grad_accum_dtype",
        "fp32",
        at_stages(sums_in_fp32, 0),
        "DeepSpeed refuses this pair too; use stage 1",
    ),
    _refused(
        "gradient sums below the weights' precision",
        "data_types.grad_accum_dtype",
        "fp16",
        sums_in_third_dtype,
        "use fp32, or the dtype of the weights",
    ),
    _works("dtype of gradients on the wire", "communication_data_type", "fp32"),
)

_ZERO_ROWS = (
    _works("ZeRO stage 0", f"{_ZERO}.stage", 0),
    _works("ZeRO stage 1", f"{_ZERO}.stage", 1),
    _works("ZeRO stage 2", f"{_ZERO}.stage", 2),
    _refused("ZeRO stage 3", f"{_ZERO}.stage", 3, equals(3), "it shards what subnetworks hold; use stage 1 or 2"),
    _works("overlap of communication", f"{_ZERO}.overlap_comm", True),
    _works("size of gradient buckets", f"{_ZERO}.reduce_bucket_size", 1000),
    _works("size of weight buckets", f"{_ZERO}.allgather_bucket_size", 1000),
    _works("step without gradient norm", f"{_ZERO}.compute_grad_norm", False),
    _refused(
        "no gradient norm, with clipping",
        f"{_ZERO}.compute_grad_norm",
        False,
        clips_without_norm,
        "gradient_clipping must be 0",
    ),
    _works("optimizer in host memory, stages 1 and 2", f"{_ZERO}.offload_optimizer", {"device": "cpu"}),
    _works("optimizer in host memory (old key)", f"{_ZERO}.cpu_offload", True),
    _refused(
        "optimizer in host memory, stage 0",
        f"{_ZERO}.offload_optimizer",
        {"device": "cpu"},
        at_stages(has_device("cpu"), 0),
        "DeepSpeed offloads at stages 1 and 2; use stage 1",
    ),
    _refused("optimizer on NVMe", f"{_ZERO}.offload_optimizer", {"device": "nvme"}, has_device("nvme"), 'use "cpu"'),
    _refused("SuperOffload", f"{_ZERO}.offload_optimizer.super_offload", True, is_on, _STAGE_3),
    _refused("offload of parameters", f"{_ZERO}.offload_param", {"device": "cpu"}, has_device("cpu", "nvme"), _STAGE_3),
    _refused("offload of parameters (old key)", f"{_ZERO}.cpu_offload_param", True, is_on, _STAGE_3),
    _refused("ZenFlow", f"{_ZERO}.zenflow", {"topk_ratio": 0.1}, is_present, "it steps parts of a gradient by itself"),
    _refused("hierarchical partitions (ZeRO++)", f"{_ZERO}.zero_hpz_partition_size", 2, is_above_one, _STAGE_3),
    _refused("quantized weights (ZeRO++)", f"{_ZERO}.zero_quantized_weights", True, is_on, _STAGE_3),
    _refused(
        "quantized frozen weights (ZeRO++)", f"{_ZERO}.zero_quantized_nontrainable_weights", True, is_on, _STAGE_3
    ),
    _refused("quantized gradients (ZeRO++)", f"{_ZERO}.zero_quantized_gradients", True, is_on, _STAGE_3),
    _refused(
        "error for unused parameters",
        f"{_ZERO}.ignore_unused_parameters",
        False,
        equals(False),
        "a missing gradient counts as zeros",
    ),
    _refused("old ZeRO stage 1", f"{_ZERO}.legacy_stage1", True, is_on, "DeepSpeed has removed it"),
    _hint("elastic checkpoints", f"{_ZERO}.elastic_checkpoint", True, is_on, "every checkpoint resumes on any layout"),
    _refused(
        "masters from 16-bit weights", f"{_ZERO}.load_from_fp32_weights", False, equals(False), "they are saved in fp32"
    ),
    _hint("contiguous gradients", f"{_ZERO}.contiguous_gradients", False, equals(False), _PACKS),
    _hint("all-reduce in place of reduce-scatter", f"{_ZERO}.reduce_scatter", False, equals(False), _AVERAGE),
    _hint("buckets of many ranks", f"{_ZERO}.use_multi_rank_bucket_allreduce", False, equals(False), _AVERAGE),
    _hint("broadcasts in place of all-gathers", f"{_ZERO}.allgather_partitions", False, equals(False), _PACKS),
    _hint(
        "round-robin gradients", f"{_ZERO}.round_robin_gradients", True, is_on, "every unit is spread over its holders"
    ),
    _hint("aligned parameters", f"{_ZERO}.parameter_alignment", True, is_on, "each has storage of its own"),
)

_REST = (
    _refused("prescaled gradients", "prescale_gradients", True, is_on, _AVERAGE),
    _refused("predivided gradients", "gradient_predivide_factor", 2.0, differs(1), _AVERAGE),
    _refused("sum of gradients", "gradient_allreduce_op", "sum", differs("mean"), _AVERAGE),
    _works("gradient accumulation by the engine", "gradient_accumulation_steps", 2),
    _works("gradient accumulation by the caller", "managed_gradient_accumulation", False),
    _refused(
        "accumulation by the caller, overlap, stages 0 and 1",
        "managed_gradient_accumulation",
        False,
        at_stages(overlaps_unmanaged, 0, 1),
        "DeepSpeed refuses this too; use stage 2",
    ),
    _works("activation checkpointing (Transformers', DeepSpeed's)", "activation_checkpointing", {"profile": False}),
    _works("torch.compile of the model, its layers, or by engine.compile()", ""),
    _works("model without storage (`sdp_deepspeed.Init`, or the meta device)", ""),
    _works("flops profiler", "flops_profiler", {"enabled": True}),
    _works("wall-clock breakdown", "wall_clock_breakdown", True),
    _works("comms logger", "comms_logger", {"enabled": True}),
    _works("tensor parallelism (AutoTP)", "tensor_parallel.autotp_size", 2),
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
    _refused("sequence parallelism", "sequence_parallel_size", 2, is_above_one),
    _refused("expert parallelism", "expert_parallel", {"enabled": True}, is_enabled),
    Row("pipeline modules", "", "refused"),
    _refused("hybrid engine", "hybrid_engine", {"enabled": True}, is_enabled),
    _refused("DeepCompile", "compile.deepcompile", True, is_on),
    _refused("data efficiency (curriculum, random-LTD)", "data_efficiency", {"enabled": True}, is_enabled),
    _refused("autotuning", "autotuning", {"enabled": True}, is_enabled, "it tries stages and sizes of its own"),
    _works("optimizers of single elements", "optimizer.type", "AdamW"),
    _works("optimizers of whole tensors: Muon, Adafactor, Lamb", "optimizer.type", "Adafactor"),
    Row(
        "optimizers of whole tensors, of what neuron units or tensor-parallel ranks cut",
        "",
        "refused",
        note='no rank has all of a tensor; use the block strategy, or `"use_muon": False` for those param groups',
    ),
    _refused(
        "Muon of single attention heads",
        "optimizer.params.per_head_muon",
        True,
        is_on,
        "the optimizer's own step takes whole matrices; remove the key",
    ),
    _refused(
        "an unknown optimizer",
        "optimizer.type",
        "OneBitAdam",
        is_unknown_optimizer,
        f"use one of {', '.join(ELEMENTWISE_OPTIMIZERS + WHOLE_TENSOR_OPTIMIZERS)}, or set {_ALLOW}: true if yours "
        'updates each element by itself, "whole_tensors" if each tensor',
    ),
    _hint("permission for untested optimizers", "zero_allow_untested_optimizer", True, None, f"{_ALLOW} decides"),
    _hint("legacy fusion in the optimizer", "optimizer.legacy_fusion", True, is_on, _MASTERS),
    _works("checkpoints in universal format", "checkpoint.load_universal", True),
    _refused(
        "checkpoints on node-local disks", "checkpoint.use_node_local_storage", True, is_on, "use a shared folder"
    ),
    _refused(
        "checkpoint writers",
        "checkpoint.writer",
        {"type": "FAST"},
        is_present,
        "checkpoints have a format of their own",
    ),
    _refused(
        "checkpoints through DataStates",
        "datastates_ckpt",
        {"host_cache_size": 1},
        differs(False),
        "as checkpoint.writer",
    ),
    _hint(
        "validation of checkpoint tags", "checkpoint.tag_validation", "FAIL", None, "different tags are always an error"
    ),
)

TABLE: tuple[Row, ...] = _BLOCK + _ZERO_ROWS + _PRECISION + _REST


def matching_rows(config: SubnetworkConfig, ds_config: Mapping[str, Any]) -> list[tuple[Row, Any]]:
    """Rows of what is refused or has no effect that a config asks for, each with its value.

    Args:
        config: the parsed block.
        ds_config: the whole DeepSpeed config, loaded.
    """
    tree = normalized(ds_config, config.model_dump())
    values = ((row, lookup(tree, row.path)) for row in TABLE)
    return [(row, value) for row, value in values if row.applies is not None and row.applies(value, tree)]
