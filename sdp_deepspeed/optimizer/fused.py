"""Which of torch's kernels step: the fused one of Adam and AdamW, where nobody has chosen another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.utils import logger

from sdp_deepspeed.support.optimizers import HOW

_KINDS = (torch.optim.Adam, torch.optim.AdamW)
_DEVICES = ("cpu", "cuda")


def kernels_of(optimizer: torch.optim.Optimizer) -> list[Mapping[str, Any]]:
    """What each param group says of how it is stepped."""
    return [{key: options[key] for key in HOW if key in options} for options in optimizer.param_groups]


def choose_kernels(optimizer: torch.optim.Optimizer, kernels: Sequence[Mapping[str, Any]]) -> None:
    """Have each param group say again what `kernels_of` found."""
    for options, kernel in zip(optimizer.param_groups, kernels, strict=True):
        options.update(kernel)


def prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's Adam and AdamW step in one pass over weights, gradients and moments, without scratch memory as large
    as the weights. Param groups for which the user said how to step stay as they are; so do other optimizers, among
    them subclasses and DeepSpeed's, which have kernels of their own. Not for elements that several ranks step: where an
    element lies in its tensor may decide how its last bit is rounded.

    Args:
        optimizer: with the fp32 tensors in its groups that this rank steps.
    """
    for options in optimizer.param_groups if type(optimizer) in _KINDS else ():
        is_open = options["fused"] is None and options["foreach"] is None
        needs_others = options["capturable"] or options["differentiable"]
        if is_open and not needs_others and all(tensor.device.type in _DEVICES for tensor in options["params"]):
            options["fused"] = True


def avoid_fused(optimizer: torch.optim.Optimizer) -> None:
    """Where several ranks step the same elements (stage 0), in flat masters of their own: on a CPU torch's fused
    kernels round the last elements of a tensor otherwise, so that holders would drift apart.

    Args:
        optimizer: with the fp32 tensors in its groups that this rank steps.
    """
    chosen = [options for options in optimizer.param_groups if options.get("fused")]
    chosen = [options for options in chosen if any(tensor.device.type == "cpu" for tensor in options["params"])]
    for options in chosen:
        options["fused"] = False
    if chosen:
        logger.warning(
            "optimizer: fused is off, as at ZeRO stage 0 several ranks step the same elements, which a CPU's fused "
            "kernel rounds by their place; use stage 1 or 2"
        )
