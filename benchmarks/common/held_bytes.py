"""Tensors that a live engine holds on one rank, and their bytes; of our engine, and of DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

# Where DeepSpeed 0.19.8's optimizers keep gradients besides `parameter.grad` (private names).
HOST_GRADIENT_ATTRIBUTES = ("averaged_gradients", "all_grad_tensors", "fp32_groups_gradients_flat")


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples; whatever else is there is passed over."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of the storages behind `tensors`, each storage once; `seen` carries those that were counted before. Of a
    tensor that is sharded over ranks (FSDP2) this rank's shard counts."""
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def weight_tensors(engine: Any) -> list[torch.Tensor]:
    """The module's parameters as they lie in memory, and what a rank stores beside them (backward regime)."""
    mask = getattr(getattr(engine, "_core", None), "mask", None)
    if mask is None:
        beside = getattr(engine, "absent_tensors", list)  # a benchmark's way to tell of shards (ZeRO-3)
        return [*(parameter.data for parameter in engine.module.parameters()), *beside()]
    buffers = {id(buffer) for buffer in mask.buffers.values()}
    return [tensor.data for tensor in mask.tensors() if id(tensor) not in buffers]


def inner_optimizer(engine: Any) -> Any:
    """The torch optimizer that steps, below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def optimizer_tensors(engine: Any) -> list[torch.Tensor]:
    """Moments, and the tensors that are stepped (the master copy, unless they are the weights themselves).

    These are the state's keys too: ZeRO-3 has them in param groups only while it steps them.
    """
    optimizer = inner_optimizer(engine)
    stepped = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
    stepped += [key.data for key in list(optimizer.state) if isinstance(key, torch.Tensor)]
    return stepped + [tensor for state in list(optimizer.state.values()) for tensor in tensors_in(state)]


def gradient_tensors(engine: Any) -> list[torch.Tensor]:
    """Gradients that are alive now: of the module, of the tensors that are stepped, and in the host's own buffers."""
    parameters = list(engine.module.parameters())
    parameters += [p for group in inner_optimizer(engine).param_groups for p in group["params"]]
    held = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = getattr(engine.optimizer, "sharded", None)
    if sharded is not None:
        for bucket in sharded.held:
            held += [bucket.average] if bucket.average is not None else []
            held += [bucket.gradients.flat] if bucket.gradients.has_memory else []
        return held
    for name in HOST_GRADIENT_ATTRIBUTES:
        held += tensors_in(getattr(engine.optimizer, name, None))
    return held
