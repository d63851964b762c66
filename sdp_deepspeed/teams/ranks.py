"""The ranks of this team."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sdp_deepspeed.plan.tensor_parallel_shards import UNDIVIDED, TensorParallelShards
from sdp_deepspeed.teams.shares import part


class GlooGroup:
    """A gloo group of some ranks of torch.distributed's world, or this process without one. Collective.

    Args:
        lists: ranks of each group, of which this one is in one.
        timeout: seconds that ranks wait for rank 0, which waits for other teams.
    """

    def __init__(self, lists: Sequence[Sequence[int]], timeout: float) -> None:
        self.rank, self.size = 0, 1
        self.process_group: Any = None
        if max(map(len, lists)) > 1:
            limit = timedelta(seconds=timeout)
            self.process_group, _ = dist.new_subgroups_by_enumeration([[*ranks] for ranks in lists], limit, "gloo")
            self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        values = [value]
        if self.process_group is not None:
            dist.broadcast_object_list(values, group_src=0, group=self.process_group)
        return values[0]

    def all(self, value: bool) -> bool:
        """Whether it is true on all ranks."""
        return -self.largest(-int(value)) == 1

    def largest(self, value: int) -> int:
        """The largest value of all ranks."""
        number = torch.tensor([value])
        if self.process_group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.process_group)
        return int(number)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor in host memory by its sum over all ranks."""
        if self.process_group is not None:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        """The mean over all ranks, fp32 in host memory; exact if they are equal."""
        return (self.add(tensor.to("cpu", torch.float64, copy=True)) / self.size).float()

    def join_shares(self, share: torch.Tensor, length: int) -> torch.Tensor:
        """All elements of a tensor of which each rank has a share (`shares.part`)."""
        if self.process_group is None:
            return share
        width = -(-length // self.size)
        padded = torch.zeros(width)
        padded[: len(share)] = share
        gathered = torch.empty(width * self.size)
        dist.all_gather_single(gathered, padded, group=self.process_group)
        lengths = [part(length, rank, self.size)[1] for rank in range(self.size)]
        return torch.cat([values[:n] for values, n in zip(gathered.split(width), lengths, strict=True)])

    def close(self) -> None:
        if self.process_group is not None:
            dist.destroy_process_group(self.process_group)
            self.process_group = None


class TeamRanks(GlooGroup):
    """All ranks of this team.

    Args:
        shards: parts of tensors that tensor-parallel ranks divide.
        data_parallel: the ranks with the same parts, a list for each tensor-parallel rank.
    """

    def __init__(
        self, timeout: float, shards: TensorParallelShards = UNDIVIDED, data_parallel: Sequence[Sequence[int]] = ()
    ) -> None:
        super().__init__([range(dist.get_world_size() if dist.is_initialized() else 1)], timeout)
        self._shards = shards
        self._data_parallel: GlooGroup = self
        self._tensor_parallel: GlooGroup | None = None
        if shards.size > 1:
            self._data_parallel = GlooGroup(data_parallel, timeout)
            self._tensor_parallel = GlooGroup([*zip(*data_parallel, strict=True)], timeout)

    @property
    def divided(self) -> dict[str, tuple[int, int]]:
        """Rank and size among the ranks with the same part of a divided tensor, by dense name."""
        return dict.fromkeys(self._shards.divisions, (self._data_parallel.rank, self._data_parallel.size))

    def join(self, name: str, share: torch.Tensor, length: int) -> torch.Tensor:
        """All elements of what this rank has of a tensor, of which each rank with the same has a share."""
        group = self._data_parallel if name in self._shards.divisions else self
        return group.join_shares(share, length)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The dense tensor, in host memory, of which this rank has its part under tensor parallelism; collective."""
        if name not in self._shards.divisions:
            return tensor
        assert self._tensor_parallel is not None
        return self._shards.join(name, tensor, self._tensor_parallel.process_group)

    def close(self) -> None:
        for group in {self._data_parallel, self._tensor_parallel} - {self, None}:
            assert group is not None
            group.close()
        super().close()
