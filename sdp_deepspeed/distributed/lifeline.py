"""Signs of life of all ranks, so that a run ends soon where a process, a node or its link is gone.

A collective whose packets get lost waits until its group's time limit, half an hour over gloo. Here a thread of each
rank shows a sign of life in the store every few seconds. Rank 0 looks for those of all, and writes down what it finds;
the others look for rank 0's. A second thread looks whether the store answers at all: on the far side of a dead link
nothing else is to be noticed. Who finds a rank silent ends its own process, for nothing can be raised in a collective
that waits for lost packets.

Silence is counted in looks, not by the clock: a process that was stopped for a while (Ctrl-Z) has not looked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any, NoReturn

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.exits import error_at_end, error_of_exit, remember_exits
from sdp_deepspeed.distributed.store_gatherer import Store, found
from sdp_deepspeed.messages import listed

BEAT_SECONDS = 2.0  # between two signs, and two looks
# For the error that a rank gets by itself where another one has failed: it says more.
GRACE_SECONDS = 20.0
# That rank 0, whose process takes the store along, waits for others to see that it left; one that holds Python's lock
# for long looks late. Most look within a beat.
FAREWELL_SECONDS = 8.0
EXIT_CODE = 1
_LEFT = b"left"
_SILENT, _FAILED = "silent", "failed"  # keys, beside those of the ranks


class Lifeline:
    """One rank's; every rank makes one with the same store, and starts it.

    Args:
        store: for these keys alone.
        limit: of silence, seconds.
        end: ends this process after saying why; others in tests.
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, limit: float, end: Callable[[str], None] | None = None
    ) -> None:
        self._store = store
        self._rank, self._size, self._limit = rank, size, limit
        self._end = self._end_process if end is None else end
        self._others = frozenset(range(1, size) if rank == 0 else [0])  # that this rank looks for
        self._left: set[int] = set()
        self._beat = 0
        self._seen: dict[int, bytes] = {}
        self._silence: dict[int, float] = {}  # seconds, as this rank has counted them
        self._unanswered = 0.0  # seconds of the look that goes on
        self._error: str | None = None  # that ends this process
        self._closing, self._closed = threading.Event(), threading.Event()
        self._finalizer: Finalize | None = None

    def start(self, server: object = None) -> None:
        """Show signs of life from now on, until `close` or the end of the process.

        Args:
            server: lives until this rank has left; on rank 0 the store that all others ask.
        """
        self._show()
        threading.Thread(target=self._beats, args=(server,), name="lifeline", daemon=True).start()
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()
        # At the end of a process that `multiprocessing` started, too, where nothing of atexit runs.
        self._finalizer = Finalize(None, self._at_exit, exitpriority=0)

    def close(self) -> None:
        """Nobody is to miss this rank any more; returns at once."""
        self._closing.set()

    def look(self, seconds: float) -> str | None:
        """Show a sign of life, and look for those of others.

        Args:
            seconds: that count as silence where nothing has changed since the last look.

        Returns:
            Why this process must end now, if it must.
        """
        self._show()
        if self._rank and self._store.check([_SILENT]):
            return self._store.get(_SILENT).decode()
        silent = self._silent_ranks(seconds)
        if not silent:
            return None
        why = (
            f"nothing was heard of rank {listed(silent)} for {self._limit:.0f} seconds: killed or stopped, or a node "
            "or link is down"
        )
        if self._rank == 0:
            self._store.set(_SILENT, why.encode())
        return why

    def failure(self) -> str | None:
        """What the first rank that failed said, if one did."""
        return self._store.get(_FAILED).decode() if self._store.check([_FAILED]) else None

    @property
    def is_alone(self) -> bool:
        """Whether nobody is left to look for."""
        return self._left == self._others

    def _show(self) -> None:
        self._beat += 1
        self._store.set(str(self._rank), str(self._beat).encode())

    def _silent_ranks(self, seconds: float) -> list[int]:
        """One that has not shown its first sign is on its way."""
        for key, shown in found(self._store, [str(rank) for rank in sorted(self._others - self._left)]).items():
            if shown is not None:
                self._note(int(key), shown, seconds)
        # Ranks of one node fall silent together, and show their signs at different moments.
        about = self._limit - 1.5 * BEAT_SECONDS
        is_silent = any(silence >= self._limit for silence in self._silence.values())
        return sorted(rank for rank, silence in self._silence.items() if is_silent and silence >= about)

    def _note(self, rank: int, shown: bytes, seconds: float) -> None:
        if shown == _LEFT:
            self._left.add(rank)
            self._silence.pop(rank, None)
            return
        self._silence[rank] = self._silence[rank] + seconds if self._seen.get(rank) == shown else 0.0
        self._seen[rank] = shown

    def _beats(self, _server: object = None) -> None:
        """What the first thread does; its argument lives as long."""
        try:
            while not self._closing.wait(BEAT_SECONDS) and not self.is_alone:
                why, failure = self.look(BEAT_SECONDS), self.failure()
                self._unanswered = 0.0
                if why is not None:
                    self._end(why)
                elif failure is not None:
                    self._end_after_grace(failure)
                if why is not None or failure is not None:
                    return
            self._leave()
        except Exception:  # of the store, which went with its process
            if 0 not in self._left:
                self._end_after_grace("rank 0 ended, or the connection to it broke, and no error of its own came here")
        finally:
            self._closed.set()
            if self._finalizer is not None:
                self._finalizer.cancel()

    def _end_after_grace(self, why: str) -> None:
        self._closed.set()  # nothing is asked any more
        if not self._closing.wait(GRACE_SECONDS):
            self._end(why)

    def _leave(self) -> None:
        """Say that nobody is to miss this rank. The store goes with rank 0, which waits until others have seen that."""
        if self._own_error is not None and not self._store.check([_FAILED]):
            self._store.set(_FAILED, f"rank {self._rank} failed: {self._own_error}".encode())
        self._store.set(str(self._rank), _LEFT)
        until = time.monotonic() + self._farewell
        while self._rank == 0 and not self.is_alone and time.monotonic() < until:
            self._silent_ranks(0.0)
            self._unanswered = 0.0
            time.sleep(0.05)

    @property
    def _own_error(self) -> str | None:
        """`sys.exit` lets go of who is watched, which closes this, before the process is at its end."""
        return self._error or error_of_exit()

    @property
    def _farewell(self) -> float:
        """Seconds; who failed waits for a beat alone, as its launcher waits for it."""
        return FAREWELL_SECONDS if self._own_error is None and self._rank == 0 else 1.5 * BEAT_SECONDS

    def _watch(self) -> None:
        """What the second thread does: the first may wait for the store."""
        while not self._closed.wait(BEAT_SECONDS):
            self._unanswered += BEAT_SECONDS
            if self._unanswered > self._limit:
                self._end(
                    f"rank 0's store has not answered for {self._limit:.0f} seconds: rank 0 is stopped, or a node or "
                    "link is down"
                )
                return

    def _at_exit(self) -> None:
        """An error that ends this process is told before others miss the rank. A thread that is in the store when the
        interpreter goes would abort it."""
        self._error = error_at_end()
        self._closing.set()
        self._closed.wait(self._farewell + BEAT_SECONDS / 2)

    def _end_process(self, why: str) -> NoReturn:
        with contextlib.suppress(
            OSError, ValueError
        ):  # whoever read our output may be gone; a bar leaves its line open
            print(
                f"\nerror on rank {self._rank}: {why}. This rank ends; start the run again to go on from its last "
                "checkpoint",
                file=sys.stderr,
                flush=True,
            )
        if self._rank == 0:  # with its process goes the store, in which others must read this first
            time.sleep(1.5 * BEAT_SECONDS)
        _flush()
        os._exit(EXIT_CODE)


def _flush() -> None:
    """What was printed goes out: `os._exit` drops it where output is a file or a pipe."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def watch_ranks(owner: object, dist: Any, ranks: Gatherer, limit: float | None) -> None:
    """Watch all ranks while an object lives; every rank calls it.

    Args:
        dist: `torch.distributed`.
        ranks: all of them.
        limit: of silence, seconds; None watches nobody.
    """
    if limit is None or ranks.size == 1:
        return
    remember_exits()
    store = dist.distributed_c10d._get_default_store()
    # New each time: a store that outlives a restart by torchrun has the keys of ranks that ended, and each node counts
    # restarts by itself.
    name = ranks.gather_objects(secrets.token_hex(8))[0]
    # By a connection of its own: over one, a question waits for the answer to the one before it.
    own = dist.PrefixStore(f"sdp_deepspeed/lifeline/{name}", store.clone())
    lifeline = Lifeline(own, rank=ranks.rank, size=ranks.size, limit=limit)
    lifeline.start(store)
    # At the end of the process the lifeline closes itself, and is waited for.
    weakref.finalize(owner, _close, lifeline, store).atexit = False


def _close(lifeline: Lifeline, _store: object) -> None:
    """The store, on rank 0 the one that all others ask, lives as long as who is watched."""
    lifeline.close()
