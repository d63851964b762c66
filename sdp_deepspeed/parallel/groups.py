"""Process groups: one per holder set, the data-parallel group, and a gloo group for control.

Holder sets consist of data-parallel indices, 0 to D - 1. With tensor parallelism, each tensor-parallel rank has its own
data-parallel ranks, and therefore its own process groups.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from sdp_deepspeed.units import Holders

CONTROL, HOLDERS = "sdp_deepspeed_control", "sdp_deepspeed_holders"  # group names in PyTorch's logs


@dataclass(frozen=True)
class RankGroup:
    """A set of ranks that contains this rank.

    Args:
        ranks: data-parallel indices in ascending order.
        process_group: process group of these ranks; None for a single holder.
        scatters_directly, gathers_directly: whether a reduce-scatter and an all-gather send shards point-to-point: over
            gloo only, on one node always. Gloo implements reduce-scatter as an all-reduce; between nodes, sending
            directly takes fewer bytes if no node has more than two of the ranks. Gloo's all-gather is a ring, which
            takes fewer bytes if any node has two.
        comm: `torch.distributed`, or a module with the same functions that logs them (`deepspeed.comm`).
    """

    ranks: Holders
    process_group: dist.ProcessGroup | None
    position: int
    scatters_directly: bool = False
    gathers_directly: bool = False
    comm: ModuleType = dist

    @property
    def size(self) -> int:
        return len(self.ranks)

    def num_received(self, size: int) -> int:
        """Elements that a rank receives directly in a reduce-scatter or all-gather of `size` elements."""
        return size // self.size * (self.size - 1)


class Groups:
    """This rank's process groups. The constructor is a collective of the default group, with equal arguments.

    `dist.new_group` must be called by all ranks, so every rank calls it for every set, in the same order. Equal sets
    share a group, and the set of all data-parallel ranks uses the data-parallel group.

    Args:
        holder_sets: all sets in the plan; ascending data-parallel indices.
        ranks: global ranks by data-parallel index, ascending, a list for each tensor-parallel rank. Default: all
            ranks, without tensor parallelism.
        control: a gloo group of all ranks.

    Attributes:
        rank: this rank's data-parallel index.
        data_parallel: the group of this rank's data-parallel ranks.
        tensor_parallel_rank: index of the list in `ranks` that contains this rank.
        some_hold_alone: whether a holder set, of any rank, is a single rank.
    """

    def __init__(
        self,
        holder_sets: Collection[Holders],
        *,
        ranks: Sequence[Sequence[int]] | None = None,
        control: dist.ProcessGroup,
        comm: ModuleType = dist,
    ) -> None:
        everyone, me = list(range(dist.get_world_size())), dist.get_rank()
        ranks = [everyone] if ranks is None else ranks
        self.ranks = [list(members) for members in ranks]
        self.tensor_parallel_size = len(ranks)
        self.control, timeout = control, default_group_timeout()
        self._created = list[Any]()
        nodes = [""] * len(everyone)
        dist.all_gather_object(nodes, socket.gethostname(), group=control)
        self.some_hold_alone = any(len(holders) == 1 for holders in holder_sets)
        self._groups: dict[Holders, RankGroup] = {}
        for tensor_parallel_rank, members in enumerate(self.ranks):
            all_indices = tuple(range(len(members)))
            for holders in sorted({all_indices, *holder_sets}):
                global_ranks = [members[index] for index in holders]
                process_group = self._process_group(global_ranks, everyone, timeout)
                if me in global_ranks:
                    self._groups[holders] = _rank_group(holders, global_ranks, process_group, nodes, comm)
            if me in members:
                self.rank, self.tensor_parallel_rank = members.index(me), tensor_parallel_rank
                self.data_parallel = self._groups[all_indices]

    def _process_group(
        self, ranks: list[int], everyone: list[int], timeout: timedelta | None
    ) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if ranks == everyone:
            return dist.group.WORLD
        group: Any = dist.new_group(ranks, timeout=timeout, group_desc=HOLDERS)  # of other types on other ranks
        if dist.get_rank() in ranks:
            self._created.append(group)
        return group

    def of(self, ranks: Holders) -> RankGroup | None:
        """The group of a set of data-parallel indices; None if this rank is not in it."""
        return self._groups.get(ranks)

    def close(self) -> None:
        """Destroy the groups that were created here."""
        for group in self._created:
            dist.destroy_process_group(group)
        self._created.clear()


def _rank_group(
    holders: Holders,
    ranks: list[int],
    process_group: dist.ProcessGroup | None,
    nodes: Sequence[str],
    comm: ModuleType,
) -> RankGroup:
    position = ranks.index(dist.get_rank())
    if process_group is None or dist.get_backend(process_group) != "gloo":
        return RankGroup(holders, process_group, position, comm=comm)
    num_on_node = Counter(nodes[rank] for rank in ranks)
    most = 1 if len(num_on_node) == 1 else max(num_on_node.values())  # ranks of one of several nodes
    return RankGroup(
        holders, process_group, position, scatters_directly=most <= 2, gathers_directly=most == 1, comm=comm
    )


def group_of_one() -> dist.ProcessGroup:
    """A process group of this rank alone, created once per default group, for APIs that require a group.

    All ranks must call it, though no group has two of them: PyTorch 2.14 names later groups by a count that goes up
    only where a group is created, so ranks that differ in it wait for each other for ever.
    """
    default = dist.group.WORLD
    assert default is not None
    if default not in _of_one:
        group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc=HOLDERS)
        _of_one[default] = group
    return _of_one[default]


_of_one = WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]()


def control_group() -> dist.ProcessGroup:
    """A new gloo group of all ranks, for barriers and objects, with the timeout of the default group. Collective."""
    group: Any = dist.new_group(backend="gloo", timeout=default_group_timeout(), group_desc=CONTROL)
    return group


def default_store() -> dist.Store:
    """The store of the default group, in which all its ranks find the same keys."""
    default = dist.group.WORLD
    assert default is not None
    return default.get_group_store()


def default_group_timeout() -> timedelta | None:
    """Timeout of the default group. New groups would otherwise get their backend's default."""
    group = dist.group.WORLD
    assert group is not None
    options = group._get_backend(group._device_types[0]).options
    return None if options is None else options._timeout  # fake backends have none


def device_type() -> str:
    """Device type on which ranks train by default: the accelerator, or "cpu" without one or with gloo."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
    return "cpu" if accelerator is None or is_gloo else accelerator.type
