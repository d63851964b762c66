"""What optimizers need where parameters are sharded over several meshes: the norm, and param groups."""

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
    """As `torch.nn.utils.clip_grad_norm_`, of a model that `fully_shard` returned, or of some of its parameters.

    Every rank calls it, for the same parameters of the dense model: one all-reduce of a number over all ranks. A unit's
    shards are spread over its holders and averaged there already, so each element of the dense gradient is on one rank,
    and the sum over all ranks counts it once, whatever the number of holders or replicas. Under tensor parallelism that
    is so of what is divided, and of the rest each of these ranks has a copy.

    Args:
        parameters: under tensor parallelism the model itself. Of a model, what is gathered becomes shards first.
        max_norm: infinity changes no gradient.
        norm_type: above 0; may be infinity.
        foreach: False computes one tensor after the other.

    Returns:
        The norm before clipping, the same on every rank, in fp32.

    Raises:
        ValueError: a parameter is no DTensor (one of FSDP2's `ignored_params`): nobody averaged its gradient; or under
            tensor parallelism parameters without their model.
        RuntimeError: with `error_if_nonfinite`, on all ranks, if the norm is not finite.
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type: got {norm_type}, expected a number above 0, or infinity")
    if is_sharded(parameters):
        sharded_model_of(parameters).reshard()  # type: ignore[arg-type]  # what is gathered is not what has gradients
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    named = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    copied, num_copies = _copied(parameters, named)
    found = [parameter for parameter in named if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in found]
    if any(not isinstance(gradient, DTensor) for gradient in gradients):
        raise ValueError(
            "clip_grad_norm_: a gradient is no DTensor: give parameters of a model that sdp_deepspeed.fully_shard "
            "returned, without those in ignored_params, after backward has averaged them"
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
    if not math.isinf(max_norm):  # else only the norm is asked for
        _scale(local, torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach=foreach)
    return total


def _copied(parameters: Any, named: Sequence[torch.Tensor]) -> tuple[set[int], int]:
    """Parameters (their ids) that each tensor-parallel rank has, and how many these ranks are."""
    of_axes = any(isinstance(p, DTensor) and p.device_mesh.mesh_dim_names in (OF_UNITS, OF_SHARED) for p in named)
    if not of_axes:
        return set(), 1
    tp = sharded_model_of(parameters).tensor_parallel if is_sharded(parameters) else None
    if tp is None:
        raise ValueError(
            "clip_grad_norm_: got parameters of a model under tensor parallelism; give the model that "
            "sdp_deepspeed.fully_shard returned, which knows of which of them each rank has a copy"
        )
    sharded = sharded_model_of(parameters)
    return {id(sharded.parameter(part)) for part in sharded.held_parts() if not tp.is_divided(part.name)}, tp.size


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


def _device(parameters: Iterable[Any]) -> torch.device:
    """Where collectives run, which is elsewhere than gradients that are offloaded."""
    kinds = (parameter.device_mesh.device_type for parameter in parameters if isinstance(parameter, DTensor))
    return torch.device(next(kinds, None) or device_type())


# ---- param groups ---------------------------------------------------------------------------------------------------


def param_groups(
    parameters: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """What to give an optimizer: the same parameters and options, each group divided by the mesh of its parameters, and
    the group's number (`sdp_group`), by which checkpoints know which are one.

    PyTorch's optimizers step all tensors of a group together (`foreach`, their default on GPUs, or `fused`), which
    DTensors refuse if they are of several meshes. Parameters without storage, of units that this rank lacks, are left
    out, so ranks may have other numbers of groups; a scheduler that takes a function for each group takes one for each
    group of the result.

    Args:
        parameters: a model that `fully_shard` returned (what is gathered becomes shards first), its parameters, alone
            or with names, or param groups of them.
    """
    if is_sharded(parameters):
        sharded_model_of(parameters).reshard()  # type: ignore[arg-type]  # else what is gathered would be stepped
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
