"""One process group for each distinct holder set: units with the same holders share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from sdp_deepspeed.distributed.step_limit import take_limit_of_the_run

_DESCRIPTION = "sdp_deepspeed_holders"  # of the groups, as PyTorch's own logs name them
# Of the axis of each mesh under tensor parallelism. They differ, so that no unit's mesh is equal to that of what is
# shared: over DTensors of several meshes `torch.nn.utils.clip_grad_norm_` raises, where it would miss parts.
_OF_UNITS, _OF_SHARED = ("sdp_holders",), ("sdp_shared",)
UNDER_TENSOR_PARALLELISM = (_OF_UNITS, _OF_SHARED)


def make_meshes(
    mesh: DeviceMesh, holder_sets: Iterable[tuple[int, ...]], columns: Sequence[tuple[int, ...]] = ()
) -> tuple[dict[tuple[int, ...], DeviceMesh], int]:
    """Meshes over the holder sets that this rank is in. Every rank of all columns calls it with the same sets, and all
    make all groups in one order.

    Args:
        mesh: 1-d, of this rank's column; a set of all of it needs no group of its own.
        holder_sets: ranks of the mesh, ascending.
        columns: the meshes of all tensor-parallel ranks, as ranks of the default group; none stands for `mesh` alone.

    Returns:
        The meshes by holder set, and how many groups of more than one rank were made (on all ranks together).
    """
    rank, num_groups = mesh.get_local_rank(), 0
    own = tuple(mesh.mesh.tolist())
    everyone, names = tuple(range(mesh.size())), _OF_UNITS if columns else None
    meshes = {everyone: _named(mesh, _OF_UNITS) if columns else mesh}
    for holders in sorted({*holder_sets} - {everyone}):
        for column in columns or (own,):
            members = [column[holder] for holder in holders]
            group = dist.new_group(members, backend=dist.get_backend(mesh.get_group()), group_desc=_DESCRIPTION)
            num_groups += len(holders) > 1
            if rank in holders and column == own:
                take_limit_of_the_run(dist, group)
                meshes[holders] = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=names)
    return meshes, num_groups


def mesh_of_shared(mesh: DeviceMesh, columns: Sequence[tuple[int, ...]]) -> DeviceMesh:
    """For what is in no unit.

    Args:
        mesh, columns: as for `make_meshes`.
    """
    return _named(mesh, _OF_SHARED) if columns else mesh


def _named(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=axes)


def device_type() -> str:
    """Of a mesh that nobody gave: the accelerator's, unless there is none or all groups are gloo's."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type
