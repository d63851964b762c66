"""Models whose gradients cannot be averaged over holders, with either host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.messages import KEY


def refuse_model(model: nn.Module) -> None:
    """Raise ValueError for modules whose gradients cannot be averaged over holders, and for Parameters that share
    memory without being one object: each of them would be averaged and stepped on its own. Frozen ones may.
    """
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(f"{KEY}: {name!r} ({type(module).__name__}) produces sparse gradients; use sparse=False")
        if "deepspeed.moe.layer" in {base.__module__ for base in type(module).__mro__}:
            raise ValueError(f"{KEY}: {name!r} is a DeepSpeed mixture of experts; use one of Transformers' instead")
    for first, second in _in_the_same_memory(model):
        raise ValueError(
            f"{KEY}: {first!r} and {second!r} share memory, but are two Parameters; assign the Parameter itself "
            "(b.weight = a.weight, not .data), or clone one"
        )


def _in_the_same_memory(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Pairs of names of parameters that share elements, where at least one is trained."""
    parameters = dict(model.named_parameters())
    before: dict[Any, list[tuple[Any, Any, bool, str]]] = {}
    for name, parameter in parameters.items():
        if not parameter.numel():
            continue
        start = parameter.storage_offset()
        strides = zip(parameter.shape, parameter.stride(), strict=True)
        stop = start + 1 + sum((size - 1) * stride for size, stride in strides)
        is_trained = parameter.requires_grad
        key = id(parameter.untyped_storage())
        for other_start, other_stop, other_is_trained, other_name in before.get(key, ()):
            may_overlap = start < other_stop and other_start < stop
            if may_overlap and (is_trained or other_is_trained) and _overlap(parameter, parameters[other_name]):
                yield other_name, name
        before.setdefault(key, []).append((start, stop, is_trained, name))


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two views of one storage share an element; strided views may interleave without sharing any."""
    places = [
        torch.arange(t.untyped_storage().nbytes() // t.element_size(), device="cpu")
        .as_strided(t.shape, t.stride(), int(t.storage_offset()))
        .flatten()
        for t in (first, second)
    ]
    return bool(torch.isin(*places).any())
