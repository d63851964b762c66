"""One process group for each distinct holder set: units with the same holders share it."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_DESCRIPTION = "sdp_deepspeed_holders"  # of the groups, as PyTorch's own logs name them


def make_meshes(
    mesh: DeviceMesh, holder_sets: Iterable[tuple[int, ...]]
) -> tuple[dict[tuple[int, ...], DeviceMesh], int]:
    """Meshes over the holder sets that this rank is in. Every rank of the mesh calls it with the same sets, and all
    make all groups in one order.

    Args:
        mesh: of all ranks, 1-d; a set of all of them needs no group of its own.
        holder_sets: ranks of the mesh, ascending.

    Returns:
        The meshes by holder set, and how many groups of more than one rank were made (on all ranks together).
    """
    rank, num_groups = mesh.get_local_rank(), 0
    everyone = tuple(range(mesh.size()))
    meshes = {everyone: mesh}
    for holders in sorted({*holder_sets} - {everyone}):
        group = dist.new_group(list(holders), backend=dist.get_backend(mesh.get_group()), group_desc=_DESCRIPTION)
        num_groups += len(holders) > 1
        if rank in holders:
            meshes[holders] = DeviceMesh.from_group(group, mesh.device_type)
    return meshes, num_groups
