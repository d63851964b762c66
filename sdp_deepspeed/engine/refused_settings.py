"""Settings that the engine refuses before it is built, because it would not do what they request.

Settings that do not change the result are accepted: those without an effect at the run's ZeRO stage or precision, and
those that only tune DeepSpeed's own reduction. Of a running engine, parameters that were frozen later are refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from sdp_deepspeed.messages import KEY, quoted

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from sdp_deepspeed.parallel.optimizer import ShardedOptimizer

_AVERAGE = "gradients are averaged over their holders; remove the key"
_MASTERS = "masters and optimizer state are fp32; remove the key"
_FORMAT = "checkpoints have their own format; remove the key"


class Refusal(NamedTuple):
    """A value of a DeepSpeed setting that is refused."""

    path: str  # JSON path of the setting
    values: str  # for docs/config.md
    is_refused: Callable[[Any], bool]
    why: str


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _is_no_norm(value: Any) -> bool:
    return not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf


def _is_low_precision(value: Any) -> bool:
    dtype = str(value.get("dtype")).removeprefix("torch.")
    return _is_on(value) and dtype not in ("bf16", "bfloat16")


def _is_nvme(value: Any) -> bool:
    return isinstance(value, Mapping) and str(value.get("device")) == "nvme"


REFUSED = (
    Refusal(
        "zero_optimization.stage",
        "3",
        lambda stage: stage == 3,
        "use stage 1 or 2, or FSDP2; teams run at stage 3, too",
    ),
    Refusal("zero_optimization.offload_optimizer", "NVMe", _is_nvme, 'use the device "cpu"'),
    Refusal("zero_optimization.zenflow", "on", _is_on, "it steps parts of a gradient on its own; remove the key"),
    Refusal("bf16.bf16_master_weights_and_grads", "true", _is_on, _MASTERS),
    Refusal("bf16.bf16_optimizer_states", "true", _is_on, _MASTERS),
    Refusal("fp16.fp16_master_weights_and_grads", "true", _is_on, _MASTERS),
    Refusal(
        "torch_autocast",
        "dtype other than bfloat16",
        _is_low_precision,
        'fp16 needs a gradient scaler; set torch_autocast.dtype to "bfloat16"',
    ),
    Refusal("gradient_clipping", "below 0, inf, nan", _is_no_norm, "expected a number of at least 0 (0: no clipping)"),
    Refusal("prescale_gradients", "true", _is_on, _AVERAGE),
    Refusal("gradient_predivide_factor", "other than 1", lambda value: value != 1, _AVERAGE),
    Refusal("gradient_allreduce_op", 'other than "mean"', lambda value: value != "mean", _AVERAGE),
    Refusal("sequence_parallel_size", "above 1", _is_above_one, "sequence parallelism is not implemented"),
    Refusal("expert_parallel", "on", _is_on, "expert parallelism is not implemented"),
    Refusal("hybrid_engine", "on", _is_on, "it replaces modules; remove the key"),
    Refusal("compile.deepcompile", "true", _is_on, "it reduces gradients on its own; use torch.compile"),
    Refusal("data_efficiency", "on", _is_on, "it changes layers during training; remove the key"),
    Refusal("autotuning", "on", _is_on, "it changes stage and batch size on its own; remove the key"),
    Refusal("optimizer.params.per_head_muon", "true", _is_on, "Muon steps whole matrices here; remove the key"),
    Refusal("checkpoint.use_node_local_storage", "true", _is_on, "save to a folder that all nodes share"),
    Refusal("checkpoint.load_universal", "true", _is_on, "start from weights that zero_to_fp32.py has exported"),
    Refusal("checkpoint.writer", "any", lambda _: True, _FORMAT),
    Refusal("datastates_ckpt", "on", _is_on, _FORMAT),
)


def refuse_config(config: Mapping[str, Any], read: Any) -> None:
    """Raise ValueError for settings that are not supported, a line for each with its JSON path.

    Args:
        read: the config object that DeepSpeed made of it, with values converted ("1" is 1, "false" is false).
    """
    parts = {"zero_optimization": read.zero_config, "fp16": read.float16_config, "bf16": read.bfloat16_config}
    values = {key: part.model_dump(mode="json", exclude_unset=True) for key, part in parts.items()}
    refuse_settings({**config, **values})


def refuse_settings(tree: Mapping[str, Any]) -> None:
    """Raise ValueError for settings that are not supported, a line for each with its JSON path.

    Args:
        tree: the DeepSpeed config, with values of the right types.
    """
    # Keys of a precision that is off have no effect.
    tree = {key: part for key, part in tree.items() if key not in ("fp16", "bf16") or _is_on(part)}
    refused = [
        f"{path}: got {value!r}, which is not supported with {KEY}: {why}"
        for path, _, is_refused, why in REFUSED
        if (value := _lookup(tree, path)) is not None and is_refused(value)
    ]
    if _lookup(tree, "zero_optimization.compute_grad_norm") is False and (tree.get("gradient_clipping", 1.0) or 0) > 0:
        refused.append(
            "zero_optimization.compute_grad_norm: got False, but clipping needs the norm; set gradient_clipping to 0"
        )
    if refused:
        raise ValueError("\n".join(refused))


def _lookup(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def refuse_single_processes() -> None:
    """Raise ValueError if Accelerate takes each rank for the only process: all would train on the same data."""
    accelerate, num_ranks = sys.modules.get("accelerate.state"), dist.get_world_size()
    if accelerate is None or not accelerate.is_initialized():
        return
    seen = accelerate.AcceleratorState().num_processes
    if seen != num_ranks:
        raise ValueError(
            f"Accelerate sees {seen} of {num_ranks} ranks, so all would train on the same data; import sdp_deepspeed "
            "before TrainingArguments or an Accelerator are created"
        )


def refuse_frozen(engine: DeepSpeedEngine, optimizer: ShardedOptimizer) -> None:
    """Raise RuntimeError for parameters that were frozen after the start, at stage 0 in fp32: DeepSpeed does not step
    them there. In its other stages and precisions momentum and decay keep changing them, as here in every stage."""
    if engine.zero_optimization_stage() > 0 or engine.get_data_types()[0] != torch.float32:
        return
    held = [name for bucket in optimizer.held for name in bucket.layout.names]
    if frozen := [name for name in dict.fromkeys(held) if not optimizer.mask.parameters[name].requires_grad]:
        raise RuntimeError(
            f"frozen after deepspeed.initialize: {quoted(frozen)}; at ZeRO stage 0 momentum and weight decay "
            "would still change them, so freeze them before"
        )


def refuse_unused(optimizer: ShardedOptimizer) -> None:
    """Raise AssertionError for parameters of this rank without a gradient in this step. As in DeepSpeed,
    `ignore_unused_parameters: false` has an effect with CPU offload only."""
    if unused := optimizer.reducer.unused():
        raise AssertionError(
            f"unused parameters: {quoted(unused)} had no gradient in this step; use them in the loss, or set "
            "zero_optimization.ignore_unused_parameters to true"
        )
