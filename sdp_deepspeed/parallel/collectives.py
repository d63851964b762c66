"""Reduce-scatter, all-gather, reduce and broadcast over groups of ranks; over gloo, some send shards point-to-point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from sdp_deepspeed.parallel.groups import RankGroup

_TAG = 0x5D9  # of point-to-point messages


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
