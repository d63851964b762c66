"""Gather slices of the dense model on all data-parallel ranks: for the dense views of both hosts.

Re-plans and exports use `checkpoint/fill.py` instead, where each rank receives only the elements that it
wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sdp_deepspeed.parallel.groups import RankGroup, all_gather


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
    """Fill all segments, with one all-gather per dtype. Collective, with the same segments on all ranks. Each rank
    sends as many elements as the one that has most.

    Args:
        group: all data-parallel ranks.
    """
    for dtype in dict.fromkeys(segment.values.dtype for segment in segments):
        same = [segment for segment in segments if segment.values.dtype == dtype]
        sizes, starts = [0] * group.size, []
        for rank, values, _ in same:
            starts.append(sizes[rank])
            sizes[rank] += values.numel()
        flat = torch.empty((group.size, max(sizes)), dtype=dtype, device=same[0].values.device)
        for (rank, values, _), start in zip(same, starts, strict=True):
            if rank == group.position:
                flat[rank, start : start + values.numel()].view(values.shape).copy_(values)
        all_gather([flat.view(-1)], [flat[group.position]], [group])
        for (rank, values, is_kept), start in zip(same, starts, strict=True):
            if rank != group.position and not is_kept:
                values.copy_(flat[rank, start : start + values.numel()].view(values.shape))
