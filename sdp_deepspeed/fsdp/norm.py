"""`clip_grad_norm_` where parameters are sharded over several meshes: the norm of the averaged dense gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, of a model that `fully_shard` returned, or of some of its parameters.

    Every rank calls it, for the same parameters of the dense model: one all-reduce of a number over all ranks. A unit's
    shards are spread over its holders and averaged there already, so each element of the dense gradient is on one rank,
    and the sum over all ranks counts it once, whatever the number of holders or replicas.

    Args:
        norm_type: above 0; may be infinity.
        foreach: False computes one tensor after the other.

    Returns:
        The norm before clipping, the same on every rank, in fp32.

    Raises:
        ValueError: a parameter is no DTensor (one of FSDP2's `ignored_params`): nobody averaged its gradient.
        RuntimeError: with `error_if_nonfinite`, on all ranks, if the norm is not finite.
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type: got {norm_type}, expected a number above 0, or infinity")
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    named = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    found = [parameter for parameter in named if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in found]
    if any(not isinstance(gradient, DTensor) for gradient in gradients):
        raise ValueError(
            "clip_grad_norm_: a gradient is no DTensor: give parameters of a model that sdp_deepspeed.fully_shard "
            "returned, without those in ignored_params, after backward has averaged them"
        )
    local = [gradient.to_local() for gradient in gradients]
    total = _over_all_ranks(_norms(local, norm_type, foreach=foreach), norm_type, _device(gradients))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    _scale(local, torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach=foreach)
    return total


def _norms(local: Sequence[torch.Tensor], norm_type: float, *, foreach: bool | None) -> list[torch.Tensor]:
    """Of each tensor, in fp32; 0 of one without elements."""
    filled = [tensor for tensor in local if tensor.numel()]
    if foreach is False or not filled:
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32) for tensor in filled]
    return list(torch._foreach_norm(filled, norm_type, dtype=torch.float32))


def _over_all_ranks(norms: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm of all of them and of other ranks'; who has none takes part."""
    own = torch.stack([torch.zeros((), dtype=torch.float32, device=device), *(norm.to(device) for norm in norms)])
    if math.isinf(norm_type):
        total = own.max()
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    total = own.pow(norm_type).sum()
    dist.all_reduce(total)
    return total.pow(1.0 / norm_type)


def _scale(local: Sequence[torch.Tensor], factor: torch.Tensor, *, foreach: bool | None) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in local:
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, tensors in by_device.items():
        if foreach is False:
            for tensor in tensors:
                tensor.mul_(factor.to(device))
        else:
            torch._foreach_mul_(tensors, factor.to(device))


def _device(gradients: Sequence[DTensor]) -> torch.device:
    """Where collectives run, which is elsewhere than gradients that are offloaded."""
    kind = gradients[0].device_mesh.device_type if gradients else "cpu" if dist.get_backend() == "gloo" else "cuda"
    return torch.device(kind)
