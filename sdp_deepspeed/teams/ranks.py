"""The ranks of this team."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdp_deepspeed.teams.shares import part


class TeamRanks:
    """The ranks of this team: the world of torch.distributed, or this process without one. Collective.

    Args:
        timeout: seconds that ranks wait for rank 0, which waits for other teams.
    """

    def __init__(self, timeout: float) -> None:
        is_world = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_world else 0
        self.size = dist.get_world_size() if is_world else 1
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if is_world else None

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def all(self, value: bool) -> bool:
        """Whether it is true on all ranks."""
        return -self.largest(-int(value)) == 1

    def largest(self, value: int) -> int:
        """The largest value of all ranks."""
        number = torch.tensor([value])
        if self._group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return int(number)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks, fp32 in host memory; exact if they are equal."""
        total = tensor.to("cpu", torch.float64, copy=True)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return (total / self.size).float()

    def join_shares(self, share: torch.Tensor, length: int) -> torch.Tensor:
        """All elements of a tensor of which each rank has a share (`shares.part`)."""
        if self._group is None:
            return share
        width = -(-length // self.size)
        padded = torch.zeros(width)
        padded[: len(share)] = share
        gathered = torch.empty(width * self.size)
        dist.all_gather_single(gathered, padded, group=self._group)
        lengths = [part(length, rank, self.size)[1] for rank in range(self.size)]
        return torch.cat([values[:n] for values, n in zip(gathered.split(width), lengths, strict=True)])

    def close(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
