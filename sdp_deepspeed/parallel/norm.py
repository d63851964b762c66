"""The gradient norm of the dense model, and clipping.

The norm is that of the averaged gradient. Every parameter counts once, whatever its number of holders, replicas and
tensor-parallel ranks. Each rank sums the squares (or other powers) of the shards that it owns; of tensors that are
equal on all tensor-parallel ranks only the first of these ranks does. One all-reduce over all ranks adds these sums. An
infinite or NaN gradient anywhere makes the norm infinite or NaN on every rank, before any weight is updated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.distributed as dist


def gradient_norm(owned: Sequence[torch.Tensor], device: torch.device, norm_type: float = 2.0) -> torch.Tensor:
    """Norm over all ranks; collective.

    Args:
        owned: averaged gradients of this rank's shards, without those that other ranks count; all on one device.
        device: device of collectives.
        norm_type: p of the norm, above 0; infinity: the largest absolute value.

    Returns:
        float64 scalar, the same on all ranks.
    """
    norms = torch.zeros(1, dtype=torch.float64, device=device)
    if owned := [gradient for gradient in owned if gradient.numel()]:  # an empty one has no largest value
        dtype = reduce(torch.promote_types, (gradient.dtype for gradient in owned), torch.float32)
        norms = torch.stack(torch._foreach_norm([*owned], norm_type, dtype)).double().to(device)
    if is_maximum := math.isinf(norm_type):  # backends differ in the maximum of a NaN
        total = torch.stack([norms.nan_to_num(posinf=math.inf).max(), norms.isnan().any()])
    else:
        total = norms.pow(norm_type).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM)
    if is_maximum:
        return torch.where(total[1] > 0, math.nan, total[0])
    return total.pow(1 / norm_type)


def scale_gradients(gradients: Sequence[torch.Tensor], norm: torch.Tensor, clip: float, loss_scale: float) -> None:
    """Unscale gradients by the loss scale, and clip them to the norm `clip`; in place.

    Args:
        norm: norm after division by the loss scale.
        clip: maximum norm; 0 does not clip.
    """
    if not gradients:
        return
    if clip > 0:
        factor = ((norm + 1e-6) / clip).clamp_(min=1.0) * loss_scale  # 1e-6 as in DeepSpeed
        torch._foreach_mul_(list(gradients), factor.reciprocal().float().to(gradients[0].device))
    elif loss_scale != 1.0:
        torch._foreach_mul_(list(gradients), 1.0 / loss_scale)
