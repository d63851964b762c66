"""Gather slices of the dense model on all data-parallel ranks: dense views, and updated weights in the backward regime.

Re-plans and exports of FSDP2 use `checkpoint/box_exchange.py` instead, where each rank receives only the elements that
it wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sdp_deepspeed.parallel.collectives import all_gather
from sdp_deepspeed.parallel.groups import RankGroup


class Segment(NamedTuple):
    """Elements that one rank sends to all.

    Args:
        rank: data-parallel index of the sender.
        values: view of the elements, of the same shape on all ranks: sent by `rank`, overwritten on the others.
        is_kept: whether this rank has the elements, and ignores those that it receives.
    """

    rank: int
    values: torch.Tensor
    is_kept: bool = False


def gather_segments(segments: Sequence[Segment], group: RankGroup) -> None:
    """Fill all segments, with one all-gather per dtype. Collective, with the same segments on all ranks."""
    for dtype in dict.fromkeys(segment.values.dtype for segment in segments):
        same = [segment for segment in segments if segment.values.dtype == dtype]
        sizes = [(segment.rank, segment.values.numel()) for segment in same]
        mine = [segment.values for segment in same if segment.rank == group.position]
        received = gather_flat(sizes, mine, group, dtype, same[0].values.device)
        for (rank, values, is_kept), flat in zip(same, received, strict=True):
            if rank != group.position and not is_kept:
                values.copy_(flat.view(values.shape))


def gather_flat(
    sizes: Sequence[tuple[int, int]],
    mine: Sequence[torch.Tensor],
    group: RankGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Gather tensors, each from one rank, with one all-gather. Collective. Each rank sends as many elements as the one
    that has most.

    Args:
        sizes: data-parallel index of the sender, and number of elements, of each tensor; the same on all ranks.
        mine: the tensors that this rank sends.
        group: all data-parallel ranks.

    Returns:
        All tensors, flat, as views of one buffer.
    """
    counts, starts = [0] * group.size, []
    for rank, size in sizes:
        starts.append(counts[rank])
        counts[rank] += size
    flat = torch.empty((group.size, max(counts)), dtype=dtype, device=device)
    received = [flat[rank, start : start + size] for (rank, size), start in zip(sizes, starts, strict=True)]
    sent = [values for (rank, _), values in zip(sizes, received, strict=True) if rank == group.position]
    for values, given in zip(sent, mine, strict=True):
        values.view(given.shape).copy_(given)
    all_gather([flat.view(-1)], [flat[group.position]], [group])
    return received
