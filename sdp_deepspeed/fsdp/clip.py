"""Gradient norm and param groups for parameters that are sharded over several meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from sdp_deepspeed.checkpoint.state import NUMBER
from sdp_deepspeed.fsdp.sharded_model import OF_SHARED, OF_UNITS, device_type, is_sharded, sharded_model_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients by the norm of the averaged gradient of the dense model, as `torch.nn.utils.clip_grad_norm_`.

    Collective, for the same parameters of the dense model on all ranks. Each element of the dense gradient is sharded
    over the holders of its unit, so the sum over all ranks counts it once, whatever the number of holders or replicas.
    Parameters that tensor-parallel ranks replicate are counted once, too.

    Args:
        parameters: a model that `fully_shard` returned, or some of its parameters. With tensor parallelism: the model.
        max_norm: maximum norm; infinity does not clip.
        norm_type: above 0; may be infinity.
        error_if_nonfinite: whether to raise if the norm is not finite.
        foreach: whether to use foreach kernels. Default: where supported.

    Returns:
        The norm before clipping, in fp32, the same on every rank.

    Raises:
        ValueError: a gradient is not a DTensor (of `ignored_params`), so it has not been averaged; or parameters were
            passed without their model under tensor parallelism.
        RuntimeError: on all ranks, with `error_if_nonfinite`, if the norm is not finite.
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type: got {norm_type}, expected a number above 0, or infinity")
    if is_sharded(parameters):
        sharded_model_of(parameters).reshard()  # type: ignore[arg-type]  # gradients belong to shards
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    named = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    copied, num_copies = _copied(parameters, named)
    found = [parameter for parameter in named if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in found]
    if any(not isinstance(gradient, DTensor) for gradient in gradients):
        raise ValueError(
            "clip_grad_norm_: a gradient is not a DTensor; pass parameters of a model that sdp_deepspeed.fully_shard "
            "returned, without ignored_params, after backward"
        )
    local = [gradient.to_local() for gradient in gradients]
    once = [part for part, parameter in zip(local, found, strict=True) if id(parameter) not in copied]
    often = [part for part, parameter in zip(local, found, strict=True) if id(parameter) in copied]
    norms = _norms(once, norm_type, foreach=foreach)
    norms += [norm * num_copies ** (-1 / norm_type) for norm in _norms(often, norm_type, foreach=foreach)]
    total = _over_all_ranks(norms, norm_type, _device(named))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    if not math.isinf(max_norm):  # infinity: only the norm is needed
        _scale(local, torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach=foreach)
    return total


def _copied(parameters: Any, named: Sequence[torch.Tensor]) -> tuple[set[int], int]:
    """Ids of the parameters that tensor-parallel ranks replicate, and the number of these ranks."""
    of_axes = any(isinstance(p, DTensor) and p.device_mesh.mesh_dim_names in (OF_UNITS, OF_SHARED) for p in named)
    if not of_axes:
        return set(), 1
    tp = sharded_model_of(parameters).tensor_parallel if is_sharded(parameters) else None
    if tp is None:
        raise ValueError(
            "clip_grad_norm_: with tensor parallelism give the model that sdp_deepspeed.fully_shard returned, not its "
            "parameters"
        )
    sharded = sharded_model_of(parameters)
    return {id(sharded.parameter(part)) for part in sharded.held_parts() if not tp.is_divided(part.name)}, tp.size


def _norms(local: Sequence[torch.Tensor], norm_type: float, *, foreach: bool | None) -> list[torch.Tensor]:
    """Norm of each tensor, in fp32; 0 for empty ones."""
    filled = [tensor for tensor in local if tensor.numel()]
    if foreach is False or not filled:
        return [torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32) for tensor in filled]
    return list(torch._foreach_norm(filled, norm_type, dtype=torch.float32))


def _over_all_ranks(norms: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Norm over the tensors of all ranks; ranks without any take part."""
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


def _device(parameters: Iterable[Any]) -> torch.device:
    """Device of the collectives; offloaded gradients are elsewhere."""
    kinds = (parameter.device_mesh.device_type for parameter in parameters if isinstance(parameter, DTensor))
    return torch.device(next(kinds, None) or device_type())


# ---- param groups ---------------------------------------------------------------------------------------------------


def param_groups(
    parameters: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Split param groups by the mesh of their parameters, for an optimizer.

    PyTorch's foreach and fused optimizers step all tensors of a group together, which fails for DTensors of several
    meshes. Parameters of units that this rank lacks are left out, so the number of groups may differ between ranks; an
    LR scheduler with a list of functions needs one for each returned group.

    Args:
        parameters: a model that `fully_shard` returned, or its parameters, with or without names, or param groups.

    Returns:
        Param groups with the original options, and the number of the original group (`sdp_group`), by which checkpoints
        identify it.
    """
    if is_sharded(parameters):
        sharded_model_of(parameters).reshard()  # type: ignore[arg-type]  # the optimizer steps shards
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    given: list[Any] = list(parameters)
    groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    return [divided for number, group in enumerate(groups) for divided in _by_mesh({NUMBER: number, **group})]


def _by_mesh(group: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    by_mesh: dict[Any, list[Any]] = {}
    members: Any = group["params"]
    for member in [members] if isinstance(members, nn.Parameter) else members:
        parameter = member[1] if isinstance(member, tuple) else member
        if parameter.numel():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(member)
    return [{**group, "params": own} for own in by_mesh.values()]
