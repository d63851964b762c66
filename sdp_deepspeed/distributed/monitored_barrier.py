"""Where all ranks agree on what comes next: evaluating, saving, loading. One alone gets an error, not a hang."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch

from sdp_deepspeed.messages import listed

TIMEOUT = timedelta(minutes=5)


class Phase(IntEnum):
    """What a rank is about to do with the dense model."""

    LEAVE = 0
    FORWARD = 1
    RESIDENT = 2
    SAVE = 3
    LOAD = 4


_WORDS = {
    Phase.LEAVE: "ended its evaluation of the dense model",
    Phase.FORWARD: "began a forward pass of the dense model",
    Phase.RESIDENT: "asked for the whole dense model",
    Phase.SAVE: "began to save a checkpoint",
    Phase.LOAD: "began to load weights",
}
_BATCHES = "the dense model is a collective of all ranks, so give each the same number of batches"
_CALLS = "all ranks do this together: call it on every rank, not below `if rank == 0`"


class MonitoredBarrier:
    """Meeting point of all ranks before each collective of the dense view, and before they save or load.

    Args:
        dist: `torch.distributed`.
        group: a gloo group of all ranks, used for nothing else, with a finite timeout.
        rank, size: in that group.
        report: publishes this rank's number of meetings where others can read it; None if there is no such place.
        reports: reads the numbers of all ranks.
    """

    def __init__(
        self,
        dist: Any,
        group: Any,
        *,
        rank: int,
        size: int,
        report: Callable[[int], None] | None = None,
        reports: Callable[[], list[int]] | None = None,
    ) -> None:
        self._dist = dist
        self._group = group
        self._rank = rank
        self._size = size
        self._report = report
        self._reports = reports
        self._meetings = 0
        self.num_forwards = 0

    def wait(self, phase: Phase) -> None:
        """Every rank calls it in the same phase.

        Raises:
            RuntimeError: on all ranks when phases differ, naming ranks; on waiting ranks when one does not come.
        """
        self._meetings += 1
        if self._size > 1:
            phases = self._gather(phase)
            if len(set(phases)) > 1:
                raise RuntimeError(self._explain(phases))
        self.num_forwards = self.num_forwards + 1 if phase == Phase.FORWARD else 0

    def _gather(self, phase: Phase) -> list[Phase]:
        if self._report is not None:
            self._report(self._meetings)
        own = torch.tensor([int(phase)], dtype=torch.int64, device="cpu")
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        try:
            self._dist.all_gather(gathered, own, group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank} {_WORDS[phase]} and waited for {self._missing()}, which did not come: "
                f"{_CALLS if phase >= Phase.RESIDENT else _BATCHES}"
            ) from error
        return [Phase(int(value)) for value in gathered]

    def _missing(self) -> str:
        if self._reports is None:
            return "another rank"
        try:
            late = [rank for rank, meetings in enumerate(self._reports()) if meetings < self._meetings]
        except Exception:  # the store is gone when the rank that keeps it is
            return "another rank"
        return f"rank {listed(late)}" if late else "another rank"

    def _explain(self, phases: list[Phase]) -> str:
        said = []
        for phase in sorted(set(phases)):
            ranks = [rank for rank, other in enumerate(phases) if other == phase]
            said.append(f"rank {listed(ranks)} {_WORDS[phase]}")
        return (
            f"after {self.num_forwards} evaluation batches {'; '.join(said)}. The dense model is a collective of all "
            "ranks: give each the same number of batches (drop or repeat samples), and save and load on all together"
        )


def make_monitored_barrier(dist: Any) -> MonitoredBarrier:
    """A barrier for all ranks of the run, in a gloo group of its own, so that it cannot pair with a collective of
    the user's; every rank calls it.

    Args:
        dist: `torch.distributed`.
    """
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    # Of this engine alone: others count their own meetings.
    prefix = f"sdp_deepspeed/monitored_barrier/{group.group_name}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()

    def report(meetings: int) -> None:
        store.set(str(rank), str(meetings))

    def reports() -> list[int]:
        return [int(store.get(str(other))) if store.check([str(other)]) else 0 for other in range(size)]

    return MonitoredBarrier(dist, group, rank=rank, size=size, report=report, reports=reports)
