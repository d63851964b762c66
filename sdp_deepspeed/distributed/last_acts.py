"""What each rank did last, for the error of a rank that waits in vain.

A training step only sets attributes here. A thread publishes them in the store of the process group every few seconds,
and says for whom this rank has waited for a minute. Who gets an error where it waits, reads what the others published.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from sdp_deepspeed.distributed.store_gatherer import Store
from sdp_deepspeed.messages import listed

BEAT_SECONDS = 2.0  # between two looks of the thread
NOTICE_SECONDS = 60.0  # of waiting, before it is told for whom
_LAST_BEAT_SECONDS = 1.0  # that the thread's end may take
SLICE = timedelta(seconds=20)  # of waiting, before this rank looks whether anybody is left to wait for
# Of waiting, before a rank counts as one that will not go on by itself: a bucket on a slow network takes its time.
SETTLED_SECONDS = 240.0
_ADVICE = "All ranks must call backward and step equally often; where one failed, its own error says why"


@dataclass(frozen=True)
class Act:
    """What a rank did last.

    Args:
        what: in words.
        since: seconds of the clock.
        waits: for others, in a collective.
        call: number of that collective.
        lost: whether a collective has failed here, after which no other will come about.
        beat: when the rank was last heard of.
    """

    what: str = "built its engine"
    since: float = 0.0
    waits: bool = False
    call: int = 0
    lost: bool = False
    beat: float = 0.0


class LastActs:
    """Of the ranks of one engine; every rank makes one with the same store.

    Args:
        store: for this engine's keys alone.
        ranks: all of the group, this rank's included.
        warn: told for whom this rank waits.
    """

    def __init__(self, store: Store, *, rank: int, ranks: Sequence[int], warn: Callable[[str], None]) -> None:
        self._store = store
        self._rank = rank
        self._ranks = tuple(ranks)
        self._warn = warn
        self._what, self._since = Act.what, time.time()
        self._waits_since: float | None = None
        self._call = 0
        self._lost = False
        self._noticed = 0.0
        self._stop = threading.Event()

    def start(self) -> None:
        """Publish from now on, in a thread that ends with this object."""
        arguments = weakref.ref(self), self._stop
        thread = threading.Thread(target=_beat, args=arguments, name="last-acts", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._stop, thread)

    def note(self, what: str) -> None:
        """This rank does something else from now on."""
        self._what, self._since = what, time.time()

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """This rank does something in the block; an error that ends it is published at once, for it may be the last."""
        self.note(f"began {what}")
        try:
            yield
        except BaseException as error:
            self.note(f"{self._what}: {type(error).__name__}: {error}")
            self._try(self.publish)
            raise
        self.note(f"ended {what}")

    def wait(self, work: Any, call: int, *, in_slices: bool) -> None:
        """Wait for a collective.

        Args:
            call: its number, the same on all ranks.
            in_slices: look from time to time whether anybody is left to wait for; where waiting itself blocks the host.

        Raises:
            RuntimeError: the collective failed, or all ranks wait for one another; says what the others did last.
        """
        self._call, self._waits_since = call, time.time()
        try:
            while not self._came(work, in_slices=in_slices):
                others = self._others()
                if any(act is not None and act.lost for act in others.values()) or self._all_wait(others):
                    raise RuntimeError(self.explain())
        except RuntimeError:
            self._lost = True
            self._try(self.publish)
            raise
        finally:
            self._waits_since = None

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
        self._store.set(str(self._rank), json.dumps(asdict(self._own())).encode())

    def explain(self) -> str:
        """For whom this rank waits, as far as can be known."""
        others = self._try(self._others)
        if others is None:
            return f"rank {self._rank} waited ({self._what}) for a rank that is gone, with all that ranks had published"
        elsewhere = {
            rank: act for rank, act in others.items() if act is None or not act.waits or act.call != self._call
        }
        return f"rank {self._rank} waited ({self._what}) for {self._positions(elsewhere or others)}. {_ADVICE}"

    def look(self) -> None:
        """What the thread does."""
        self.publish()
        since = self._waits_since
        if since is not None and time.time() - since > NOTICE_SECONDS and self._noticed != since:
            self._noticed = since
            self._warn(f"{self.explain()} (waiting goes on)")

    def _own(self) -> Act:
        waits_since = self._waits_since
        waits = waits_since is not None
        return Act(self._what, waits_since or self._since, waits, self._call, self._lost, time.time())

    def _others(self) -> dict[int, Act | None]:
        """None for a rank that has published nothing yet."""
        others = [rank for rank in self._ranks if rank != self._rank]
        there = {rank: self._store.check([str(rank)]) for rank in others}
        return {rank: Act(**json.loads(self._store.get(str(rank)))) if there[rank] else None for rank in others}

    def _all_wait(self, others: Mapping[int, Act | None]) -> bool:
        """Whether every rank has waited for some time, and not in the same collective: then nobody will come."""
        now, own = time.time(), self._own()
        fresh = [act for act in others.values() if act is not None and act.waits and now - act.beat < 3 * BEAT_SECONDS]
        waited = [act for act in (own, *fresh) if act.beat - act.since > SETTLED_SECONDS]
        return len(waited) == len(self._ranks) and len({(act.what, act.call) for act in waited}) > 1

    def _positions(self, acts: Mapping[int, Act | None]) -> str:
        return listed((f"rank {rank}, {_words(act)}" for rank, act in acts.items()), separator="; ")

    @staticmethod
    def _try(work: Callable[[], Any]) -> Any:
        """None where the store is gone, with the rank that kept it."""
        try:
            return work()
        except Exception:
            return None


def _words(act: Act | None) -> str:
    if act is None:
        return "of which nothing is known"
    return f"which {act.what}{' and waits' * act.waits} since {time.time() - act.since:.0f} seconds"


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
