"""`clip_grad_norm_` for parameters that are sharded over several meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sdp_deepspeed.fsdp.meshes import OF_SHARED, OF_UNITS
from sdp_deepspeed.fsdp.sharded_model import is_sharded, sharded_model_of
from sdp_deepspeed.parallel.groups import device_type
from sdp_deepspeed.parallel.norm import gradient_norm, scale_gradients


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip gradients by the norm of the averaged gradient of the dense model (parallel/norm.py).

    Collective, for the same parameters of the dense model on all ranks.

    Args:
        parameters: a model that `fully_shard` returned, or some of its parameters. With tensor parallelism: the model.
        max_norm: maximum norm, above 0; infinity does not clip.
        norm_type: p of the norm, above 0; infinity: the largest absolute value.
        error_if_nonfinite: whether to raise if the norm is not finite.

    Returns:
        The norm before clipping, in fp32, the same on every rank.

    Raises:
        ValueError: a gradient is not a DTensor (of `ignored_params`), so it has not been averaged; or parameters were
            passed without their model under tensor parallelism.
        RuntimeError: on all ranks, with `error_if_nonfinite`, if the norm is not finite.
    """
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm: got {max_norm}, expected a number above 0, or infinity")
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type: got {norm_type}, expected a number above 0, or infinity")
    if is_sharded(parameters):
        sharded_model_of(parameters).reshard()  # type: ignore[arg-type]  # gradients belong to shards
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    named = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    elsewhere = _counted_elsewhere(parameters, named)
    trained = [parameter for parameter in named if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in trained]
    if any(not isinstance(gradient, DTensor) for gradient in gradients):
        raise ValueError(
            "clip_grad_norm_: a gradient is not a DTensor; pass parameters of a model that sdp_deepspeed.fully_shard "
            "returned, without ignored_params, after backward"
        )
    local = [gradient.to_local() for gradient in gradients]
    owned = [shard for shard, parameter in zip(local, trained, strict=True) if id(parameter) not in elsewhere]
    meshes = [parameter.device_mesh for parameter in named if isinstance(parameter, DTensor)]
    device = torch.device(meshes[0].device_type if meshes else device_type())  # offloaded gradients are elsewhere
    norm = gradient_norm(owned, device, norm_type=float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is non-finite ({norm.item()})")
    if not math.isinf(max_norm):
        scale_gradients(local, norm, max_norm, loss_scale=1.0)
    return norm.float()


def _counted_elsewhere(parameters: Any, named: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the parameters that tensor-parallel ranks replicate; none on the first of these ranks, which counts
    them."""
    if not any(isinstance(p, DTensor) and p.device_mesh.mesh_dim_names in (OF_UNITS, OF_SHARED) for p in named):
        return set()
    if not is_sharded(parameters):
        raise ValueError(
            "clip_grad_norm_: with tensor parallelism, pass the model that sdp_deepspeed.fully_shard returned, not its "
            "parameters"
        )
    sharded = sharded_model_of(parameters)
    if sharded.groups.tensor_parallel_rank == 0:
        return set()
    divided = sharded.tensor_parallel_shards.divisions
    return {id(sharded.parameter(part)) for part in sharded.held_parts() if part.name not in divided}
