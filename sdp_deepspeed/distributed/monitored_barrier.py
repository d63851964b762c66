"""Where all ranks agree on what comes next: evaluating, saving, loading. One alone gets an error, not a hang."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, Protocol

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.host_group import Channel, HostGroup
from sdp_deepspeed.distributed.host_words import DEEPSPEED, HostWords
from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.store_gatherer import Store, found
from sdp_deepspeed.messages import listed

TIMEOUT = timedelta(minutes=5)
NOTICE_SECONDS = 30.0  # of waiting, before it is told for whom
LOOK_SECONDS = 2.0  # of waiting, between two looks whether the others can still come
_PAUSES = (0.001, 0.1)  # seconds between two questions whether all have come, least and most
_PAUSE_SHARE = 8  # a pause is this part of what was waited already, so that many ranks do not keep the store busy
_ENDING_SECONDS = 1.0  # from the first connection of an ended process that is found closed to all others
_CAME, _FAILED = "came", "failed"  # keys, beside those of the ranks


class Phase(IntEnum):
    """What a rank is about to do with the dense model."""

    LEAVE = 0
    FORWARD = 1
    RESIDENT = 2
    SAVE = 3
    LOAD = 4
    PART = 5
    REPLAN = 6
    REESTIMATE = 7


_WORDS = {
    Phase.LEAVE: "ended its evaluation of the dense model",
    Phase.FORWARD: "began a forward pass of the dense model",
    Phase.RESIDENT: "asked for the whole dense model",
    Phase.SAVE: "began to save a checkpoint",
    Phase.LOAD: "began to load weights",
    Phase.PART: "ran a part of the model again, or before another",
    Phase.REPLAN: "began to re-plan",
    Phase.REESTIMATE: "began to re-estimate batch norms",
}
_BATCHES = (
    "the dense model is a collective of all ranks, so give each the same number of batches. To generate, or whatever "
    "one rank does alone: "
)
_PARTS = "a forward pass of the dense model runs the same parts on all ranks, in the same order"
_CALLS = "all ranks do this together: call it on every rank, not below `if rank == 0`"


class Meeting(Gatherer, Protocol):
    """What a barrier needs of a channel."""

    def is_gone(self, rank: int) -> bool:
        """Whether the process of another rank has ended; returns at once."""


class MonitoredBarrier:
    """Meeting point of all ranks before each collective of the dense view, and before they save or load.

    Args:
        channel: of all ranks, used for nothing else.
        store: for the numbers of meetings of this engine's ranks.
        last_acts: of this rank and others; what tells that a rank will not come.
        limit: of waiting for one of which nothing tells.
        warn: told for whom all wait.
        words: of the host.
    """

    def __init__(
        self,
        channel: Meeting,
        store: Store,
        last_acts: LastActs,
        *,
        limit: timedelta,
        warn: Callable[[str], None],
        words: HostWords = DEEPSPEED,
    ) -> None:
        self.words = words
        self._limit = limit
        self._warn = warn
        self._channel = channel
        self._store = store
        self._last_acts = last_acts
        self._meetings = 0
        self.num_forwards = 0
        self.rank, self.size = channel.rank, channel.size

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

    def ended_ranks(self) -> list[int]:
        """Those whose process has ended; empty if after a second none has. For who has lost them in a collective of
        another group, whose error does not say whom."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        until = time.monotonic() + _ENDING_SECONDS
        while not (ended := [rank for rank in others if self._channel.is_gone(rank)]) and time.monotonic() < until:
            time.sleep(_PAUSES[1])
        return ended

    def _gather(self, phase: Phase, note: Any) -> list[tuple[Phase, Any]]:
        self._last_acts.note(_WORDS[phase])
        cause: Exception | None = None
        try:
            if self._all_come(phase):
                return [(Phase(value), other) for value, other in self._channel.gather_objects((int(phase), note))]
        except RuntimeError as error:  # a rank, or the store, is gone
            cause = error
        raise RuntimeError(self._give_up(phase)) from cause

    def _all_come(self, phase: Phase) -> bool:
        """Wait for all ranks; False once it is certain that one does not come, or after the limit.

        In the store, as nobody can be woken who waits for a message of gloo's.
        """
        self._store.set(str(self._channel.rank), str(self._meetings).encode())
        came = self._store.add(_CAME, 1)
        began = looked = now = time.monotonic()
        notice = began + NOTICE_SECONDS
        while came < self._meetings * self._channel.size:
            time.sleep(min(max(_PAUSES[0], (now - began) / _PAUSE_SHARE), _PAUSES[1]))
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                if self._is_hopeless():
                    return False
            if now > notice:
                notice = math.inf
                self._notice(phase)
            if now - began > self._limit.total_seconds():
                return False
            came = self._store.add(_CAME, 0)
        return not self._store.check([_FAILED])  # who comes last may find that others have given up

    def _is_hopeless(self) -> bool:
        """Whether a rank has ended, or goes on without coming here. Of each group the first rank looks for all, others
        for that one; what one found all hear."""
        if self._store.check([_FAILED]):
            return True
        watched = self._late(self._last_acts.watched)
        elsewhere = self._last_acts.elsewhere(watched)
        late = self._late(elsewhere)  # asked again: who has come meanwhile may have gone on since
        return bool(late) or any(map(self._channel.is_gone, watched))

    def _late(self, ranks: Iterable[int]) -> list[int]:
        """Those of the ranks that have not come to this meeting."""
        came = found(self._store, [str(rank) for rank in ranks])
        return [int(rank) for rank, meetings in came.items() if int(meetings or 0) < self._meetings]

    def _notice(self, phase: Phase) -> None:
        """One warns, however many wait: a rank that is alone, as below `if rank == 0`, is to hear of it soon."""
        late = self._late(range(self.size))
        if late and self.rank == min(set(range(self.size)).difference(late)):
            limit = f"{self._limit.total_seconds():.0f} seconds"
            self._warn(
                f"rank {self.rank} {_WORDS[phase]} and waits for rank {listed(late)}: {self._why(phase)}"
                f"{self._last_seen(late)} (waiting goes on, for at most {limit})"
            )

    def _give_up(self, phase: Phase) -> str:
        """For good: tell those who wait for this rank, here or in a training step."""
        missing, seen, late = "another rank, which is gone or had given up", "", []
        with contextlib.suppress(Exception):  # the store is gone when the rank that keeps it is
            self._store.set(_FAILED, b"")
            late = self._late(range(self._channel.size))
            if late:
                missing = f"rank {listed(late)}, which did not come"
                seen = self._last_seen(late)
        if not late and (ended := self.ended_ranks()):
            missing = f"rank {listed(ended)}, which ended"
        why = f"waited for {missing}: {self._why(phase)}{seen}"
        self._last_acts.fail(why)
        return f"rank {self._channel.rank} {_WORDS[phase]} and {why}"

    def _why(self, phase: Phase) -> str:
        if phase == Phase.LEAVE and not self.num_forwards:
            return f"all ranks leave {self.words.view} together"
        if phase == Phase.RESIDENT:
            return (
                f"{_CALLS}. To write the model, {self.words.save} is called on every rank and rank 0 writes; of a "
                "checkpoint `sdp checkpoint export` makes one"
            )
        if phase in (Phase.LEAVE, Phase.FORWARD):
            return f"{_BATCHES}{self.words.alone}"
        return _PARTS if phase == Phase.PART else _CALLS

    def _last_seen(self, late: Sequence[int]) -> str:
        acts = self._last_acts.of(late)
        seen = [f"rank {rank} {act.what}" for rank, act in acts.items()]
        return f". Last seen: {listed(seen, separator='; ')}" if seen else ""

    def _explain(self, phases: list[Phase]) -> str:
        said = []
        for phase in sorted(set(phases)):
            ranks = [rank for rank, other in enumerate(phases) if other == phase]
            said.append(f"rank {listed(ranks)} {_WORDS[phase]}")
        return (
            f"after {self.num_forwards} evaluation batches {'; '.join(said)}. The dense model is a collective of all "
            "ranks: give each the same number of batches (drop or repeat samples), and save and load on all together"
        )


class Meetings:
    """A `Gatherer` of all ranks that waits for nobody in vain: each gathering is a meeting at the barrier.

    Args:
        barrier: where all ranks meet.
        phase: in which they do.
    """

    def __init__(self, barrier: MonitoredBarrier, phase: Phase) -> None:
        self._barrier, self._phase = barrier, phase
        self.rank, self.size = barrier.rank, barrier.size

    def gather_objects(self, value: object) -> list[Any]:
        """One small picklable object of every rank, in rank order.

        Raises:
            RuntimeError: as `MonitoredBarrier.wait`.
        """
        return self._barrier.wait(self._phase, value)


def make_monitored_barrier(
    host: HostGroup, last_acts: LastActs, warn: Callable[[str], None], words: HostWords = DEEPSPEED
) -> MonitoredBarrier:
    """A barrier for all ranks of the run, in a channel of its own, so that it pairs with nothing else; all call it.

    Args:
        warn: told for whom ranks wait.
    """
    dist = host.dist
    # Of this engine alone: others count their own meetings.
    prefix = f"sdp_deepspeed/monitored_barrier/{host.group.group_name}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    channel = host.channel(Channel.BARRIER, limit=TIMEOUT)
    return MonitoredBarrier(channel, store, last_acts, limit=TIMEOUT, warn=warn, words=words)
