"""What is refused before an engine is built: settings and models whose result would not be what they ask for.

Keys that have no effect at the run's stage, and hints about how DeepSpeed's own reduction works, change no result: they
are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.config import KEY, SubnetworkConfig

_AVERAGE = "gradients are averaged over their holders"
_MASTERS = "masters and optimizer state are kept in fp32"
_FORMAT = "checkpoints have a format of their own"


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def _is_above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _other_than(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value not in values


def _is_no_norm(value: Any) -> bool:
    return not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf


def _is_low_precision(value: Any) -> bool:
    dtype = str(value.get("dtype")).removeprefix("torch.")
    return _is_on(value) and dtype not in ("bf16", "bfloat16")


def _is_nvme(value: Any) -> bool:
    return isinstance(value, Mapping) and str(value.get("device")) == "nvme"


# JSON path, whether its value is refused, and why or what to do instead.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("zero_optimization.stage", lambda stage: stage == 3, "ZeRO stage 3 shards what subnetworks hold; use 1 or 2"),
    ("zero_optimization.offload_optimizer", _is_nvme, 'use the device "cpu"'),
    ("zero_optimization.zenflow", _is_on, "it steps parts of a gradient by itself"),
    ("bf16.bf16_master_weights_and_grads", _is_on, _MASTERS),
    ("bf16.bf16_optimizer_states", _is_on, _MASTERS),
    ("fp16.fp16_master_weights_and_grads", _is_on, _MASTERS),
    ("torch_autocast", _is_low_precision, 'fp16 needs a gradient scaler; set torch_autocast.dtype to "bfloat16"'),
    ("gradient_clipping", _is_no_norm, "expected a number of at least 0 (0 does not clip)"),
    ("prescale_gradients", _is_on, f"prescaled gradients: {_AVERAGE}"),
    ("gradient_predivide_factor", _other_than(1), _AVERAGE),
    ("gradient_allreduce_op", _other_than("mean"), _AVERAGE),
    ("sequence_parallel_size", _is_above_one, "sequence parallelism"),
    ("expert_parallel", _is_on, "expert parallelism"),
    ("hybrid_engine", _is_on, "it builds modules of its own"),
    ("compile.deepcompile", _is_on, "it reduces gradients by itself"),
    ("data_efficiency", _is_on, "it changes layers while it trains"),
    ("autotuning", _is_on, "it tries stages and sizes of its own"),
    ("optimizer.params.per_head_muon", _is_on, "whole matrices are stepped; remove the key"),
    ("checkpoint.use_node_local_storage", _is_on, "use a folder that all nodes share"),
    ("checkpoint.writer", lambda _: True, _FORMAT),
    ("datastates_ckpt", _is_on, _FORMAT),
)


def refuse_config(block: SubnetworkConfig, config: Mapping[str, Any], read: Any) -> None:
    """Refuse settings by name.

    Args:
        config: DeepSpeed's, loaded.
        read: what DeepSpeed made of it: it takes "1" for 1, and "false" for false.

    Raises:
        ValueError: all that is refused, each with its JSON path.
    """
    parts = {"zero_optimization": read.zero_config, "fp16": read.float16_config, "bf16": read.bfloat16_config}
    values = {key: part.model_dump(mode="json", exclude_unset=True) for key, part in parts.items()}
    refuse_settings(block, {**config, **values})


def refuse_settings(block: SubnetworkConfig, tree: Mapping[str, Any]) -> None:
    """Refuse settings by name.

    Args:
        tree: DeepSpeed's config, with values of the right types.

    Raises:
        ValueError: all that is refused, each with its JSON path.
    """
    found = [
        f"{path}: got {value!r}, which is not possible with {KEY}: {why}"
        for path, is_refused, why in _REFUSED
        if (value := _lookup(tree, path)) is not None and is_refused(value)
    ]
    if _lookup(tree, "zero_optimization.compute_grad_norm") is False and (tree.get("gradient_clipping", 1.0) or 0) > 0:
        found.append(
            "zero_optimization.compute_grad_norm: got False, but gradient_clipping needs the norm; set it to 0"
        )
    if block.regime == "backward" and block.dense_branch_scale == "coverage":
        found.append(
            f"{KEY}.dense_branch_scale: got 'coverage', but in the backward regime workers train the whole model, "
            "which needs no scale; remove the key"
        )
    if found:
        raise ValueError("\n".join(found))


def _lookup(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def refuse_model(model: nn.Module) -> None:
    """Refuse a module whose gradients could not be averaged, and Parameters that have memory in common without being
    one object: each would be averaged and stepped by itself. What nobody trains may share.

    Raises:
        ValueError: by name.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(f"{KEY}: {name!r} ({type(module).__name__}) makes sparse gradients; use sparse=False")
        if "deepspeed.moe.layer" in {base.__module__ for base in type(module).__mro__}:
            raise ValueError(f"{KEY}: {name!r} is a mixture of experts of DeepSpeed's, with expert parallelism")
    for one, other in _in_the_same_memory(model):
        raise ValueError(
            f"{KEY}: the Parameters {one!r} and {other!r} lie in the same memory, but are two objects: tie them by "
            "assigning the Parameter itself (`b.weight = a.weight`, not `.data`), or clone one of them"
        )


def _in_the_same_memory(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of names, one of which is trained, of tensors that have elements in common."""
    parameters = dict(model.named_parameters())
    before: dict[Any, list[tuple[Any, Any, bool, str]]] = {}
    for name, parameter in parameters.items():
        if not parameter.numel():
            continue
        start = parameter.storage_offset()
        strides = zip(parameter.shape, parameter.stride(), strict=True)
        stop, is_trained = start + 1 + sum((size - 1) * stride for size, stride in strides), parameter.requires_grad
        key = parameter.untyped_storage()._cdata
        for other_start, other_stop, other_is_trained, other_name in before.get(key, ()):
            may_overlap = start < other_stop and other_start < stop
            if may_overlap and (is_trained or other_is_trained) and _overlap(parameter, parameters[other_name]):
                yield other_name, name
        before.setdefault(key, []).append((start, stop, is_trained, name))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two views of one storage, also where one lies between the other's elements."""
    places = [
        torch.arange(t.untyped_storage().nbytes() // t.element_size(), device="cpu")
        .as_strided(t.shape, t.stride(), int(t.storage_offset()))
        .flatten()
        for t in (one, other)
    ]
    return bool(torch.isin(*places).any())
