"""A process group as an object that is handed in: nothing here is a module global.

Positional calls only: `torch.distributed` and `deepspeed.comm` name their arguments differently
(`input` and `tensor`), and both must fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.host_group import HostGroup
from sdp_deepspeed.distributed.last_acts import LastActs


class Work(Protocol):
    """A collective that runs."""

    def wait(self) -> Any: ...


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        return


class Meter(Protocol):
    """Counts and times collectives while it is a communicator's `meter`."""

    def metered(self, work: Work, num_bytes: int) -> Work:
        """The work, watched; this rank sends so many bytes to others in it."""


@dataclass(frozen=True)
class _Watched:
    """A collective whose errors say what the other ranks did last."""

    work: Work
    last_acts: LastActs
    call: int
    in_slices: bool

    def wait(self) -> None:
        self.last_acts.wait(self.work, self.call, in_slices=self.in_slices)


class Communicator:
    """A group that this rank is in: the data-parallel one, whose exchange it is, a tensor-parallel one, all ranks.

    Args:
        dist: `torch.distributed`, `deepspeed.comm`, or anything with their functions.
        group: process group; None is the default group.
        objects: who gathers objects of these ranks, if not `dist`. An engine's go by way of the hosts (`host_group`):
            NCCL has a time limit, and those of `deepspeed.comm` end the process under its comms logger.
        last_acts: of its ranks, for errors of collectives that fail; None leaves them as they are.

    Attributes:
        meter: of all-to-alls, as long as it is set; this rank's own concern.
    """

    def __init__(
        self, dist: Any, group: Any = None, *, objects: Gatherer | None = None, last_acts: LastActs | None = None
    ) -> None:
        self._dist = dist
        self._objects = objects
        self._group = group
        self._last_acts = last_acts
        self.meter: Meter | None = None
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, received_splits: Sequence[int], sent_splits: Sequence[int]
    ) -> Work:
        """Start an uneven all-to-all of flat tensors, splits in elements; every rank of the group calls it.

        Returns at once: the tensors must live and stay as they are until `wait` of the result has returned. On a GPU
        `wait` returns at once too, and makes the current stream wait: for it, and for no other, the collective is over.
        """
        if self.size == 1:
            return Done()
        work = self._dist.all_to_all_single(
            received, sent, list(received_splits), list(sent_splits), group=self._group, async_op=True
        )
        watched = self._watched(work, received)
        if self.meter is None:
            return watched
        return self.meter.metered(watched, (sum(sent_splits) - sent_splits[self.rank]) * sent.element_size())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce in place; every rank of the group calls it."""
        if self.size > 1 and self._last_acts is None:
            self._dist.all_reduce(tensor, group=self._group)
        elif self.size > 1:
            self._watched(self._dist.all_reduce(tensor, group=self._group, async_op=True), tensor).wait()
        return tensor

    def _watched(self, work: Work, tensor: torch.Tensor) -> Work:
        if self._last_acts is None:
            return work
        return _Watched(work, self._last_acts, self._last_acts.launch(), tensor.device.type == "cpu")

    def gather_objects(self, value: object) -> list[Any]:
        """One small picklable object of every rank, in rank order; for start-up and errors only."""
        if self._objects is not None:
            return self._objects.gather_objects(value)
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._group)
        return values


@dataclass(frozen=True)
class RankGroups:
    """All groups that a rank is in.

    Args:
        dp_group: the data-parallel group.
        world: all ranks; more than the data-parallel group under tensor parallelism.
        host: all ranks, over gloo.
        last_acts: of the data-parallel group's ranks.
        tp_group: the tensor-parallel group, None if this rank is alone in it.
    """

    dp_group: Communicator
    world: Communicator
    host: HostGroup
    last_acts: LastActs
    tp_group: Communicator | None = None
