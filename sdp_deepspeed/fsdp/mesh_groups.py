"""Param groups for optimizers whose multi-tensor kernels take DTensors of one mesh at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from sdp_deepspeed.fsdp.sharded_model import is_sharded, sharded_model_of


def param_groups(
    parameters: nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """What to give an optimizer: the same parameters and options, each group divided by the mesh of its parameters.

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
    return [divided for group in groups for divided in _by_mesh(group)]


def _by_mesh(group: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    by_mesh: dict[Any, list[Any]] = {}
    members: Any = group["params"]
    for member in [members] if isinstance(members, nn.Parameter) else members:
        parameter = member[1] if isinstance(member, tuple) else member
        if parameter.numel():
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(member)
    return [{**group, "params": own} for own in by_mesh.values()]
