"""Where all ranks agree on what comes next: evaluating, saving, loading. One alone gets an error, not a hang."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.host_group import Channel, HostGroup
from sdp_deepspeed.messages import listed

TIMEOUT = timedelta(minutes=5)


class Phase(IntEnum):
    """What a rank is about to do with the dense model."""

    LEAVE = 0
    FORWARD = 1
    RESIDENT = 2
    SAVE = 3
    LOAD = 4
    PART = 5
    REPLAN = 6


_WORDS = {
    Phase.LEAVE: "ended its evaluation of the dense model",
    Phase.FORWARD: "began a forward pass of the dense model",
    Phase.RESIDENT: "asked for the whole dense model",
    Phase.SAVE: "began to save a checkpoint",
    Phase.LOAD: "began to load weights",
    Phase.PART: "ran a part of the model again, or before another",
    Phase.REPLAN: "began to re-plan",
}
_BATCHES = (
    "the dense model is a collective of all ranks, so give each the same number of batches. To generate, or whatever "
    "one rank does alone: let all ranks enter engine.dense(resident=True), inside which each has the whole model"
)
_PARTS = "a forward pass of the dense model runs the same parts on all ranks, in the same order"
_CALLS = "all ranks do this together: call it on every rank, not below `if rank == 0`"
_WHOLE = (
    f"{_CALLS}. To write the model, engine.save_pretrained is called on every rank and rank 0 writes; of a checkpoint "
    "`sdp checkpoint export` makes one"
)
_WHY = {Phase.RESIDENT: _WHOLE, Phase.LEAVE: _BATCHES, Phase.FORWARD: _BATCHES, Phase.PART: _PARTS}


class MonitoredBarrier:
    """Meeting point of all ranks before each collective of the dense view, and before they save or load.

    Args:
        channel: of all ranks, used for nothing else, with a limit of waiting.
        report: publishes this rank's number of meetings where others can read it; None if there is no such place.
        reports: reads the numbers of all ranks.
    """

    def __init__(
        self,
        channel: Gatherer,
        *,
        report: Callable[[int], None] | None = None,
        reports: Callable[[], list[int]] | None = None,
    ) -> None:
        self._channel = channel
        self._report = report
        self._reports = reports
        self._meetings = 0
        self.num_forwards = 0

    def wait(self, phase: Phase, note: Any = None) -> list[Any]:
        """Every rank calls it in the same phase.

        Args:
            note: a small picklable object for the other ranks.

        Returns:
            The notes of all ranks.

        Raises:
            RuntimeError: on all ranks when phases differ, naming ranks; on waiting ranks when one does not come.
        """
        self._meetings += 1
        notes = [note]
        if self._channel.size > 1:
            phases, notes = map(list, zip(*self._gather(phase, note), strict=True))
            if len(set(phases)) > 1:
                raise RuntimeError(self._explain(phases))
        if phase != Phase.PART:
            self.num_forwards = self.num_forwards + 1 if phase == Phase.FORWARD else 0
        return notes

    def _gather(self, phase: Phase, note: Any) -> list[tuple[Phase, Any]]:
        if self._report is not None:
            self._report(self._meetings)
        try:
            return [(Phase(value), other) for value, other in self._channel.gather_objects((int(phase), note))]
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._channel.rank} {_WORDS[phase]} and waited for {self._missing()}, which did not come: "
                f"{_WHY.get(phase, _CALLS)}"
            ) from error

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


def make_monitored_barrier(host: HostGroup) -> MonitoredBarrier:
    """A barrier for all ranks of the run, in a channel of its own, so that it pairs with nothing else; all call it."""
    dist = host.dist
    # Of this engine alone: others count their own meetings.
    prefix = f"sdp_deepspeed/monitored_barrier/{host.group.group_name}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    rank, size = dist.get_rank(), dist.get_world_size()

    def report(meetings: int) -> None:
        store.set(str(rank), str(meetings))

    def reports() -> list[int]:
        return [int(store.get(str(other))) if store.check([str(other)]) else 0 for other in range(size)]

    return MonitoredBarrier(host.channel(Channel.BARRIER, limit=TIMEOUT), report=report, reports=reports)
