"""Process groups and collectives: one group per holder set, the data-parallel group, and a gloo group for control.

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
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from sdp_deepspeed.units import Holders

CONTROL, HOLDERS = "sdp_deepspeed_control", "sdp_deepspeed_holders"  # group names in PyTorch's logs
_TAG = 0x5D9  # of point-to-point messages


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


class Messages(NamedTuple):
    """Tensors that a rank receives from each position of its group, and sends to it; none at its own position."""

    arriving: Sequence[torch.Tensor]
    leaving: Sequence[torch.Tensor]
    group: RankGroup


def exchange(messages: Sequence[Messages]) -> None:
    """Send and receive all messages at once, and wait for them. Two ranks must list their common groups in one order.

    Receives are posted first. Gloo's all-to-all posts sends first, so one direction waits for the other.
    """
    works = []
    for arriving, _, group in messages:
        ranks = dist.get_process_group_ranks(group.process_group)
        for step in range(1, group.size):
            source = (group.position - step) % group.size
            works.append(group.comm.irecv(arriving[source], ranks[source], group.process_group, _TAG))
    for _, leaving, group in messages:
        ranks = dist.get_process_group_ranks(group.process_group)
        for step in range(1, group.size):  # staggered, so that not all send to the same rank
            target = (group.position + step) % group.size
            works.append(group.comm.isend(leaving[target], ranks[target], group.process_group, _TAG))
    for work in works:
        work.wait()


def reduce_scatter(outputs: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], groups: Sequence[RankGroup]) -> None:
    """Reduce-scatter (sum) flat tensors over their groups. Several groups at once (`sent_together` in buckets.py) must
    all have `scatters_directly`; their messages are one exchange, and sums are in the dtype of the outputs. All flat
    tensors have one dtype.

    Args:
        outputs: [shard size] each, of any dtype; may be this rank's shard of the flat tensor.
        flats: [ranks * shard size] each, in the communication dtype.
    """
    if groups[0].scatters_directly:
        _reduce_scatter_directly(outputs, flats, groups)
        return
    for output, flat, group in zip(outputs, flats, groups, strict=True):
        summed = output if output.dtype == flat.dtype else torch.empty_like(output, dtype=flat.dtype)
        if group.size > 1:
            single = getattr(group.comm, "reduce_scatter_single", None)  # not in deepspeed.comm
            (single or group.comm.reduce_scatter_tensor)(summed, flat, group=group.process_group)
        elif summed.data_ptr() != flat.data_ptr():
            summed.copy_(flat)
        if summed is not output:
            output.copy_(summed)


def _reduce_scatter_directly(
    outputs: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], groups: Sequence[RankGroup]
) -> None:
    counts = [group.num_received(flat.numel()) for flat, group in zip(flats, groups, strict=True)]
    buffers = flats[0].new_empty(sum(counts)).split(counts)
    messages, received = [], []
    for output, flat, group, buffer in zip(outputs, flats, groups, buffers, strict=True):
        leaving = flat.view(group.size, -1).unbind()
        if output.data_ptr() != leaving[group.position].data_ptr():
            output.copy_(leaving[group.position])
        shards = list(buffer.view(group.size - 1, -1).unbind())
        received.append(shards)
        arriving = [*shards[: group.position], output, *shards[group.position :]]
        messages.append(Messages(arriving, leaving, group))
    exchange(messages)
    for output, shards in zip(outputs, received, strict=True):
        for shard in shards:
            output.add_(shard)


def all_gather(flats: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], groups: Sequence[RankGroup]) -> None:
    """All-gather shards into flat tensors [ranks * shard size], in one exchange if all groups exchange directly. A
    shard may be a view of the flat tensor."""
    messages = []
    for flat, shard, group in zip(flats, shards, groups, strict=True):
        if group.size > 1 and not group.gathers_directly:
            single = getattr(group.comm, "all_gather_single", None)  # not in deepspeed.comm
            (single or group.comm.all_gather_into_tensor)(flat, shard, group=group.process_group)
            continue
        arriving = flat.view(group.size, -1).unbind()
        if arriving[group.position].data_ptr() != shard.data_ptr():
            arriving[group.position].copy_(shard)
        if group.size > 1:
            messages.append(Messages(arriving, [shard] * group.size, group))
    exchange(messages)


def reduce(output: torch.Tensor, flat: torch.Tensor, group: RankGroup, target: int) -> None:
    """Reduce (sum) `flat` to `output` of the rank at the position `target`; other outputs are empty. `flat` is
    overwritten."""
    if group.size > 1:
        group.comm.reduce(flat, _global_rank(group, target), group=group.process_group)
    if output.numel() and output.data_ptr() != flat.data_ptr():
        output.copy_(flat)


def broadcast(flat: torch.Tensor, group: RankGroup, source: int) -> None:
    """Broadcast `flat` of the rank at the position `source` to all ranks of the group."""
    if group.size > 1:
        group.comm.broadcast(flat, _global_rank(group, source), group=group.process_group)


def _global_rank(group: RankGroup, position: int) -> int:
    assert group.process_group is not None
    return dist.get_global_rank(group.process_group, position)
