"""What an estimate reads of a DeepSpeed config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.estimate.per_rank import Setup
from sdp_deepspeed.estimate.precision import Precision, num_moments
from sdp_deepspeed.estimate.sharded import ShardedSetup
from sdp_deepspeed.fsdp.refusals import refused_of_block
from sdp_deepspeed.parallel.optimizer_kinds import check_optimizer
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.schedule import Schedule
from sdp_deepspeed.total_steps import fill_total_steps

_MANY_STEPS = 10**6  # of a run whose number of steps nobody says: each phase gets some
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MUON = "muon"
_OF_MUON, _OF_ITS_ADAM = 0, 1  # param groups
_NOT_MUONS = re.compile("embed|lm_head", re.IGNORECASE)


def without_auto(
    config: Mapping[str, Any], *, micro_batch: int, accumulation: int, dtype: Literal["fp32", "bf16", "fp16"]
) -> dict[str, Any]:
    """A config in which nothing is left to the Trainer: what decides an estimate is filled in, other keys whose value
    is "auto" are dropped."""
    sizes = dict(zip(_BATCH_SIZES[1:], (micro_batch, accumulation), strict=True))
    filled: dict[str, Any] = dict(config) | {key: size for key, size in sizes.items() if config.get(key) == "auto"}
    for name in ("bf16", "fp16"):
        if isinstance(filled.get(name), Mapping) and filled[name].get("enabled") == "auto":
            filled[name] = {**filled[name], "enabled": dtype == name}
    block = filled.pop(KEY, None)  # has an "auto" of its own
    filled = _dropped_auto(filled) | ({} if block is None else {KEY: block})
    fill_total_steps(filled, _MANY_STEPS)
    return filled


def _dropped_auto(tree: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tree.items() if value != "auto"}
    return {key: _dropped_auto(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def micro_steps(config: Mapping[str, Any], num_ranks: int) -> tuple[int, int]:
    """Micro-batch of a rank, and micro-steps, from two or three of DeepSpeed's batch sizes.

    Raises:
        ValueError: they do not say it, or contradict each other.
    """
    whole, micro, accumulation = map(config.get, _BATCH_SIZES)
    if micro is None and whole is not None:
        micro = whole // (num_ranks * (accumulation or 1))
    if not micro:
        raise ValueError("give train_micro_batch_size_per_gpu, or a larger train_batch_size")
    if accumulation is None:
        accumulation = 1 if whole is None else whole // (micro * num_ranks)
    if whole is not None and whole != micro * accumulation * num_ranks:
        raise ValueError(
            f"train_batch_size is {whole}, but {num_ranks} ranks with micro-batches of {micro} and "
            f"{accumulation} micro-steps make {micro * accumulation * num_ranks}"
        )
    return micro, accumulation


def configs_of_phases(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config of each phase of a schedule, without a schedule; of a config without one itself.

    Raises:
        ValueError: as `parse`, or for a schedule whose steps nobody knows.
    """
    schedule = None if parse(config) is None else Schedule.of(config, KEY)
    if schedule is None:
        return [config]
    return [schedule.config_after(phase.first_step - 1) for phase in schedule.phases]


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What stands below a key; nothing if it is absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"recipe: deepspeed: {key}: got {value!r}, expected an object {{...}}")
    return value or {}


def setup_of(config: Mapping[str, Any], accumulation: int) -> Setup:
    """What decides bytes, from a DeepSpeed config whose settings are of the right types.

    Raises:
        ValueError: stage 3, tensor parallelism, or an optimizer, which have no formula here.
    """
    zero = _part(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2):
        raise ValueError(
            f"recipe: deepspeed: zero_optimization.stage {stage!r} cannot be estimated; possible are ZeRO stages 0, 1 "
            "and 2"
        )
    if _part(config, "tensor_parallel").get("autotp_size", 1) not in (0, 1):
        raise ValueError(
            "recipe: deepspeed: tensor_parallel cannot be estimated: leave it out for figures of a whole model on "
            "each rank, of which a tensor-parallel rank has about its share"
        )
    wire = config.get("communication_data_type")
    optimizer = optimizer_of(config)
    parameters = _part(_part(config, "optimizer"), "params")
    moments = num_moments(optimizer, has_momentum=bool(parameters.get("momentum")))
    precision = Precision.of(
        dtype_of(config),
        accumulate_in_fp32=_part(config, "data_types").get("grad_accum_dtype") == "fp32",
        wire=None if wire is None else 4 if wire == "fp32" else 2,
        moments=moments,
    )
    return Setup(
        stage=cast(Literal[0, 1, 2], stage),
        precision=precision,
        accumulation=accumulation,
        offload=_part(zero, "offload_optimizer").get("device") == "cpu",
        bucket_elements=zero.get("reduce_bucket_size"),
        moments={_OF_MUON: 1} if optimizer == _MUON else {},
    )


def refuse_unsharded(config: Mapping[str, Any]) -> None:
    """What FSDP2's host does not do of a config, or has no formula here.

    Raises:
        ValueError: in one message.
    """
    if not isinstance(config.get(KEY), Mapping):
        raise ValueError(f"FSDP2: give {KEY}; C = 1 is plain FSDP2")
    block = config[KEY]
    if block.get("schedule") is not None:
        raise ValueError(f"FSDP2: {KEY}.schedule: the plan cannot change while FSDP2 holds its shards; remove the key")
    parsed = parse({KEY: block})
    refused = [] if parsed is None else list(refused_of_block(parsed))
    if dtype_of(config) == "fp16":
        refused.append('fp16: FSDP2 has no loss scale; take "bf16": {"enabled": true}')
    zero = _part(config, "zero_optimization")
    if any(_part(zero, name).get("device") in ("cpu", "nvme") for name in ("offload_optimizer", "offload_param")):
        refused.append("zero_optimization: offload cannot be estimated; leave it out")
    if optimizer_of(config) == _MUON:
        refused.append("optimizer.type: optimizers of whole tensors cannot be estimated; put AdamW in its place")
    if refused:
        raise ValueError(f"FSDP2: {'; '.join(refused)}")


def sharded_setup_of(config: Mapping[str, Any], accumulation: int) -> ShardedSetup:
    """What decides bytes under FSDP2: shards are fp32, and bf16 is its policy's.

    Raises:
        ValueError: as `refuse_unsharded`.
    """
    refuse_unsharded(config)
    compute = 2 if dtype_of(config) == "bf16" else 4
    wire = config.get("communication_data_type")
    momentum = _part(_part(config, "optimizer"), "params").get("momentum")
    moments = num_moments(optimizer_of(config), has_momentum=bool(momentum))
    wire_bytes = (4 if wire.lower() == "fp32" else 2) if wire else compute
    return ShardedSetup(compute=compute, wire=wire_bytes, num_moments=moments, accumulation=accumulation)


def optimizer_of(config: Mapping[str, Any]) -> str:
    """DeepSpeed's `optimizer.type` in small letters; AdamW where a program brings its own.

    Raises:
        ValueError: its state has no formula here.
    """
    name = str(_part(config, "optimizer").get("type", "AdamW"))
    try:
        check_optimizer(name, allow=False)
    except ValueError as error:
        raise ValueError(
            f"recipe: deepspeed: optimizer.type {name!r} cannot be estimated: {error}; put AdamW in its place for "
            "figures with two moments"
        ) from None
    return name.lower()


def with_groups(tensors: Sequence[TensorInfo], optimizer: str) -> list[TensorInfo]:
    """Tensors with their param groups and who needs whole ones.

    Muon gets matrices but embeddings and the head, by DeepSpeed's rule, and its Adam the rest.

    Args:
        optimizer: as `optimizer_of`.
    """
    if optimizer == _MUON:
        is_its = [len(info.shape) > 1 and not _NOT_MUONS.search(info.name) for info in tensors]
        groups = [_OF_MUON if its else _OF_ITS_ADAM for its in is_its]
        return [
            replace(info, group=group, is_whole=group == _OF_MUON) for info, group in zip(tensors, groups, strict=True)
        ]
    return [replace(info, group=0) for info in tensors]


def dtype_of(config: Mapping[str, Any]) -> Literal["fp32", "bf16", "fp16"]:
    """Of the weights."""
    if (_part(config, "bf16") or _part(config, "bfloat16")).get("enabled"):
        return "bf16"
    return "fp16" if _part(config, "fp16").get("enabled") else "fp32"


def refuse_plain(config: Mapping[str, Any]) -> None:
    """ValueError for what has a formula with our block alone."""
    if optimizer_of(config) == _MUON:
        raise ValueError(
            "recipe: deepspeed: plain DeepSpeed with Muon cannot be estimated: it keeps momentum in the dtype of "
            f"gradients, and buffers of its own; give a config with {KEY}, or another optimizer"
        )
