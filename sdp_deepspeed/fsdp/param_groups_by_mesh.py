"""`param_groups` for an optimizer of parameters that are sharded over several meshes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from sdp_deepspeed.checkpoint.optimizer_state import NUMBER
from sdp_deepspeed.fsdp.sharded_model import is_sharded, sharded_model_of


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
    return [{**group, "params": of_mesh} for of_mesh in by_mesh.values()]
