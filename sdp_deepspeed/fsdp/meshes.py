"""Device meshes of FSDP2: one for each holder set of this rank, and one of all ranks for shared parameters."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from torch.distributed.device_mesh import DeviceMesh

from sdp_deepspeed.parallel.groups import Groups, group_of_one
from sdp_deepspeed.units import Holders

# Names of the mesh axes under tensor parallelism. They differ, so that no unit's mesh equals that of shared parameters.
# So `torch.nn.utils.clip_grad_norm_` raises an error for DTensors of several meshes, and cannot silently omit parts of
# the norm.
OF_UNITS, OF_SHARED = ("sdp_holders",), ("sdp_shared",)


def holder_meshes(
    holder_sets: AbstractSet[Holders], groups: Groups, mesh: DeviceMesh, *, is_divided: bool
) -> dict[Holders, DeviceMesh]:
    """A mesh for each holder set of this rank. Collective.

    Args:
        mesh: mesh of all data-parallel ranks, which is also that of the set of all ranks.
    """
    everyone = tuple(range(mesh.size()))
    meshes = {everyone: with_axes(mesh, OF_UNITS) if is_divided else mesh}
    alone = group_of_one() if groups.some_hold_alone else None  # on all ranks, also where it is not used
    for holders in sorted(holder_sets - {everyone}):
        holder_group = groups.of(holders)
        assert holder_group is not None
        group = holder_group.process_group or alone
        assert group is not None
        axes = OF_UNITS if is_divided else None
        meshes[holders] = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=axes)
    return meshes


def with_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """A mesh of the same ranks with other names of axes."""
    return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=axes)
