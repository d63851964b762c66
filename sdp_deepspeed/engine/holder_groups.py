"""Process groups of holder sets for synchronized batch norms; everything else needs none."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch.distributed as dist

from sdp_deepspeed.config import KEY
from sdp_deepspeed.distributed.step_limit import take_limit_of_the_run
from sdp_deepspeed.masking.synchronized import Holders
from sdp_deepspeed.messages import quoted

_DESCRIPTION = "sdp_deepspeed_norms"  # of the groups, as PyTorch's own logs name them


def make_holder_groups(holder_sets: Iterable[Holders], rank: int) -> dict[Holders, Any]:
    """All ranks call it with the same sets, and make all groups in one order.

    Args:
        holder_sets: ranks, ascending.
        rank: this one.

    Returns:
        The groups that this rank is in, by their ranks.
    """
    groups = {}
    for holders in sorted(set(holder_sets)):
        group = dist.new_group(list(holders), group_desc=_DESCRIPTION)
        if rank in holders:
            take_limit_of_the_run(dist, group)
            groups[holders] = group
    return groups


def refuse_divided(synchronized: Collection[str], tp_group: object) -> None:
    """
    Args:
        synchronized: names of norms that not every rank runs.
        tp_group: None without tensor parallelism.

    Raises:
        ValueError: under tensor parallelism, where the data-parallel ranks are not all ranks.
    """
    if synchronized and tp_group is not None:
        raise ValueError(
            f"{KEY}: {quoted(synchronized)} is a SyncBatchNorm of a unit, under tensor parallelism, where no group of "
            "holders is made; use BatchNorm"
        )
