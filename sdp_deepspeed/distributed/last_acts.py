"""What each rank did last, for the error of a rank that waits in vain.

A training step only sets attributes here. A thread publishes them in the store of the process group every few seconds;
on one rank of those that have waited for a minute it says for whom. Who gets an error where it waits, reads what the
others published. No time of one rank is compared with another's: their clocks may differ.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from sdp_deepspeed.distributed.act import Act, Acts, act_in_words, beat_of
from sdp_deepspeed.distributed.exits import go_on
from sdp_deepspeed.distributed.store_gatherer import Store, found
from sdp_deepspeed.messages import listed

BEAT_SECONDS = 2.0  # between two looks of the thread
NOTICE_SECONDS = 60.0  # of waiting, before it is told for whom; between two looks whether to tell it
_LAST_BEAT_SECONDS = 1.0  # that the thread's end may take
# Of waiting, before this rank looks whether anybody is left to wait for: one that has failed does not close its
# connections while a save in its background waits for others.
SLICE = timedelta(seconds=5)
# Of waiting, before a rank counts as one that will not go on by itself: a bucket on a slow network takes its time.
SETTLED_SECONDS = 240.0
_ADVICE = (
    "All ranks must call backward and step equally often; where one failed, its own error says why. What a killed rank "
    f"did in its last {BEAT_SECONDS:.0f} seconds is not known"
)


@dataclass
class _Waiting:
    """For a collective.

    Args:
        call: its number.
        since: a time by this rank's clock.
        next_look: when the thread looks whether to warn.
        seen: when it last did so.
    """

    call: int
    since: float
    next_look: float
    seen: Acts = field(default_factory=dict)


class LastActs:
    """Of the ranks of one engine; every rank makes one with the same store.

    Args:
        store: for this engine's keys alone.
        ranks: all of the group, this rank's included.
        warn: told for whom this rank waits.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        ranks: Sequence[int],
        warn: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._warn = warn
        self._num_calls = 0
        self._what, self._since = "built its engine", time.monotonic()
        self._waiting: _Waiting | None = None
        self._lost = self._ended = False
        self._beat = 0
        self._publishing = threading.Lock()
        self._stop = threading.Event()

    @property
    def watched(self) -> Sequence[int]:
        """Ranks for which this one looks when it waits for all: so each is looked for, and the store asked little."""
        return self._ranks[1:] if self._rank == self._ranks[0] else self._ranks[:1]

    def start(self) -> None:
        """Publish at once, and from now on in a thread that ends with this object."""
        self.publish()
        arguments = weakref.ref(self), self._stop
        thread = threading.Thread(target=_beat, args=arguments, name="last-acts", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._stop, thread)

    def launch(self) -> int:
        """This rank starts a collective of the group's; returns its number, the same on all ranks."""
        go_on()
        self._num_calls += 1
        return self._num_calls

    def note(self, what: str) -> None:
        """This rank does something else from now on."""
        self._what, self._since = what, time.monotonic()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """This rank does something in the block; an error that ends it is published at once, for it may be the last."""
        self.note(f"began {what}")
        try:
            yield
        except BaseException as error:
            # Of a collective's error the first line; what follows is for whom this rank waited, and so on round all.
            self.note(f"{self._what}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            self._try(self.publish)
            raise
        self.note(f"ended {what}")

    def fail(self, why: str) -> None:
        """This rank has given up on the others: whoever waits for it gets an error with these words."""
        self._lost = True
        self.note(f"{self._what}: {why}")
        self._try(self.publish)

    def of(self, ranks: Iterable[int]) -> dict[int, Act]:
        """What these ranks of the group did last, as far as they have published it."""
        acts = self._acts(rank for rank in ranks if rank in self._ranks).items()
        return {rank: act for rank, act in acts if act is not None}

    def elsewhere(self, ranks: Iterable[int]) -> dict[int, Act]:
        """Those of the ranks that will not come to where this rank waits now, if they have not come before: they have
        started collectives that come after it, have given up or ended."""
        acts = self.of(ranks).items()
        return {rank: act for rank, act in acts if act.launched > self._num_calls or act.is_away}

    def wait(self, work: Any, call: int, *, in_slices: bool) -> None:
        """Wait for a collective.

        Args:
            call: its number, the same on all ranks.
            in_slices: look from time to time whether anybody is left to wait for; where waiting itself blocks the host.

        Raises:
            RuntimeError: the collective failed, or all ranks wait for one another; says what the others did last.
        """
        now = time.monotonic()
        self._waiting = _Waiting(call, now, now + NOTICE_SECONDS)
        before: Acts = {}
        try:
            while not self._came(work, in_slices=in_slices):
                others = self._others()
                if any(act is not None and act.misses(call) for act in others.values()) or self._all_wait(
                    before, others
                ):
                    raise RuntimeError(self._explanation(self._own(), others))
                before = others
        except RuntimeError:
            self._lost = True
            self._try(self.publish)
            raise
        finally:
            self._waiting = None

    def _came(self, work: Any, *, in_slices: bool) -> bool:
        """Whether a collective is done; False after a slice of waiting."""
        try:
            work.wait(*([SLICE] if in_slices else []))
        except RuntimeError as error:
            if in_slices and not work.is_completed():
                return False
            raise RuntimeError(f"{error}\n{self.explain()}") from error
        return True

    def publish(self) -> None:
        """Now. One thread at a time: an error must not be replaced by what came before it."""
        with self._publishing:
            self._beat += 1
            self._store.set(str(self._rank), json.dumps(asdict(self._own())).encode())

    def explain(self) -> str:
        """For whom this rank waits, as far as can be known."""
        others = self._try(self._others)
        if others is None:
            return f"rank {self._rank} waited ({self._what}) for a rank that is gone, with all that ranks had published"
        return self._explanation(self._own(), others)

    def look(self) -> None:
        """What the thread does."""
        self.publish()
        waiting = self._waiting
        if waiting is None or time.monotonic() < waiting.next_look:
            return
        before, own, others = waiting.seen, self._own(), self._others()
        is_told = self._is_to_warn(before, {**others, self._rank: own})
        waiting.seen, waiting.next_look = others, math.inf if is_told else time.monotonic() + NOTICE_SECONDS
        if is_told:
            self._warn(f"{self._explanation(own, others)} (waiting goes on)")

    def _own(self) -> Act:
        waiting = self._waiting
        seconds = time.monotonic() - (self._since if waiting is None else waiting.since)
        state = self._num_calls, self._lost, self._ended, self._beat
        return Act(self._what, seconds, waiting is not None, 0 if waiting is None else waiting.call, *state)

    def _others(self) -> Acts:
        return self._acts(rank for rank in self._ranks if rank != self._rank)

    def _acts(self, ranks: Iterable[int]) -> Acts:
        texts = found(self._store, [str(rank) for rank in ranks])
        return {int(rank): None if text is None else Act(**json.loads(text)) for rank, text in texts.items()}

    def _is_to_warn(self, before: Acts, acts: Acts) -> bool:
        """Whether this is the lowest rank in the collective in which most wait: one warns, however many wait, and not
        the one for which all others do. A rank that has fallen silent is passed over."""
        waiting = {
            rank: act.collective
            for rank, act in sorted(acts.items())
            if act is not None and act.waits and act.beat != beat_of(before.get(rank))
        }
        if self._rank not in waiting:  # what it waited for has come
            return False
        ((collective, _),) = Counter(waiting.values()).most_common(1)
        return self._rank == next(rank for rank, other in waiting.items() if other == collective)

    def _all_wait(self, before: Acts, others: Acts) -> bool:
        """Whether every rank lives and has waited for some time, and not in the same collective: then nobody will come.

        Args:
            before: what the others had published when this rank last looked; who lives has done so again.
        """
        acts = [self._own(), *(act for act in others.values() if act is not None)]
        alive = all(beat_of(before.get(rank)) not in (None, beat_of(act)) for rank, act in others.items())
        waited = [act for act in acts if act.waits and act.seconds > SETTLED_SECONDS]
        return alive and len(waited) == len(self._ranks) and len({act.collective for act in waited}) > 1

    def _explanation(self, own: Act, others: Acts) -> str:
        elsewhere = {rank: act for rank, act in others.items() if not own.meets(act)}
        positions = (f"rank {rank}, {act_in_words(act)}" for rank, act in (elsewhere or others).items())
        return f"rank {self._rank} waited ({own.what}) for {listed(positions, separator='; ')}. {_ADVICE}"

    @staticmethod
    def _try(work: Callable[[], Any]) -> Any:
        """None where the store is gone, with the rank that kept it."""
        try:
            return work()
        except Exception:
            return None


def make_last_acts(dist: Any, group: Any, warn: Callable[[str], None]) -> LastActs:
    """Of the ranks of a group, for one engine; every rank of the group calls it, for each of its engines.

    Args:
        dist: `torch.distributed`.
        group: the data-parallel group.
        warn: told for whom a rank waits.
    """
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    store = dist.distributed_c10d._get_default_store()
    prefix = f"sdp_deepspeed/last_acts/{group.group_name}"
    number = store.add(f"{prefix}/{rank}", 1)  # of the group's engines, which its ranks build together
    own = dist.PrefixStore(f"{prefix}/{number}", store)
    acts = LastActs(own, rank=rank, ranks=ranks, warn=warn)
    if len(ranks) > 1:
        acts.start()
    return acts


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """Also at the process's exit: a thread that is in the store when the interpreter goes would abort it."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_LAST_BEAT_SECONDS)


def _beat(reference: weakref.ref[LastActs], stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        acts = reference()
        if acts is None:
            return
        try:
            acts.look()
        except Exception:  # the store is gone, so there is nobody left to tell
            return
        del acts
    acts = reference()
    if acts is not None:  # the process ends: what it did last is what others may ask for
        acts._ended = True
        with contextlib.suppress(Exception):
            acts.publish()
