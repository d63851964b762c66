"""The number of ranks per node, for `subnetworks: "nodes"`."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from sdp_deepspeed.messages import listed

# Set by torchrun; by the deepspeed launcher; by Open MPI; by MPICH and Intel MPI; by MVAPICH.
_VARIABLES = (
    *("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


class Location(NamedTuple):
    """Where a rank is.

    Args:
        host: name of its host.
        local_size: number of ranks on its node; None if the launcher does not say it.
    """

    host: str
    local_size: int | None

    @classmethod
    def here(cls) -> Location:
        """That of this process."""
        values = [os.environ[name] for name in _VARIABLES if name in os.environ]
        return cls(socket.gethostname(), int(values[0]) if values and values[0].isdecimal() else None)


def ranks_per_node(locations: Sequence[Location], members: Sequence[int], path: str) -> int:
    """Number of data-parallel ranks on each node.

    Args:
        locations: location of each rank.
        members: ranks of a data-parallel group; with tensor parallelism, not all.
        path: path of the setting, for messages.

    Raises:
        ValueError: the number of ranks per node is unknown, or differs; all ranks are on one node; ranks are not
            numbered node by node; or a tensor-parallel group is on two nodes.
    """
    sizes = sorted({location.local_size for location in locations if location.local_size})
    unknown = [rank for rank, location in enumerate(locations) if not location.local_size]
    remedy = "or give the number of subnetworks"
    if unknown:
        raise ValueError(
            f'{path}: "nodes", but the number of ranks per node is unknown on rank {listed(unknown)}; set '
            f"LOCAL_WORLD_SIZE, {remedy}"
        )
    size = sizes[0]
    if len(sizes) > 1 or len(locations) % size:
        raise ValueError(
            f'{path}: "nodes", but nodes have {" and ".join(map(str, sizes))} of the {len(locations)} ranks; use the '
            f"same number on each, {remedy}"
        )
    if size == len(locations):
        raise ValueError(f'{path}: "nodes", but all {size} ranks are on one node; use several, {remedy}')
    for rank, location in enumerate(locations):
        first = rank // size * size
        if location.host != locations[first].host:
            raise ValueError(
                f'{path}: "nodes", but ranks {first} and {rank} of a node with {size} ranks are on different hosts; '
                f"number ranks node by node, {remedy}"
            )
    per_node = size * len(members) // len(locations)
    if not per_node or [rank // size for rank in members] != [index // per_node for index in range(len(members))]:
        raise ValueError(
            f'{path}: "nodes", but a tensor-parallel group has ranks of two nodes; use groups that divide the {size} '
            f"ranks of a node, {remedy}"
        )
    return per_node
