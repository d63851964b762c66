"""Gathers small objects through the store in which ranks meet, before there is a group that could do it.

A collective waits for whoever comes, and pairs with whatever that rank does. A store does not: a rank that does
something else can say so, and who waits can say for whom.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sdp_deepspeed.messages import listed

_PAUSES = (0.001, 0.25)  # seconds between two looks, the first and the longest
_NOTICE_SECONDS = 60.0


class Store(Protocol):
    """`torch.distributed.Store`, as far as it is needed."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


def found(store: Store, keys: Sequence[str]) -> dict[str, bytes | None]:
    """What a store has, None for what it has not, in two questions; in more only while some keys are missing."""
    there = keys if not keys or store.check(list(keys)) else [key for key in keys if store.check([key])]
    values = dict(zip(there, store.multi_get(list(there)) if there else [], strict=True))
    return {key: values.get(key) for key in keys}


class StoreGatherer:
    """A `Gatherer` of all ranks; each makes one with the same store and prefix, and calls the same methods.

    Args:
        store: that all ranks see.
        prefix: of this gatherer's keys, used by no other.
        what: all ranks are to do together, for messages.
        seconds: until who waits gives up.
        notify: told once who is missing, if one does not come for a minute.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        ranks: tuple[int, int],
        *,
        what: str,
        seconds: float,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self.rank, self.size = ranks
        self._what = what
        self._seconds = seconds
        self._notify = notify
        self._round = 0

    def gather_objects(self, value: object) -> list[Any]:
        """One small picklable object of every rank, in rank order.

        Raises:
            RuntimeError: naming a rank that does something else, or does not come.
        """
        self._round += 1
        keys = [self._key(str(rank)) for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(value))
        self._count("came")
        self._wait(self._key("all came"))
        values = [pickle.loads(value) for value in self._store.multi_get(keys)]  # one question, however many ranks
        self._count("read")
        if self.rank == 0:  # it keeps the store, as a rule, so it leaves last; others have nothing more to ask
            self._wait(self._key("all read"))
        return values

    def _count(self, what: str) -> None:
        """The last rank says that all did: who waits asks for one key again and again, however many ranks there are."""
        if self._store.add(self._key(what), 1) == self.size:
            self._store.set(self._key(f"all {what}"), b"")

    def leave(self, why: str) -> None:
        """Say that this rank does something else; it waits for nobody. Who gathers gets an error with these words."""
        self._store.set(f"{self._prefix}/left/{self.rank}", why.encode())
        self._store.set(f"{self._prefix}/left", b"")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._round}/{name}"

    def _wait(self, key: str) -> None:
        start, pause, noticed = time.monotonic(), _PAUSES[0], False
        while not self._store.check([key]):
            if self._store.check([f"{self._prefix}/left"]):
                raise RuntimeError(self._who_left())
            waited = time.monotonic() - start
            if waited > self._seconds:
                raise RuntimeError(f"{self._what}: rank {self._missing()} did not come within {waited:.0f} seconds")
            if waited > _NOTICE_SECONDS and not noticed:
                self._notify(f"{self._what}: waiting for rank {self._missing()}")
                noticed = True
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    def _who_left(self) -> str:
        notes = {rank: f"{self._prefix}/left/{rank}" for rank in range(self.size)}
        left = [rank for rank, key in notes.items() if self._store.check([key])]
        return f"{self._what}: rank {listed(left)} {self._store.get(notes[left[0]]).decode()}"

    def _missing(self) -> str:
        return listed(rank for rank in range(self.size) if not self._store.check([self._key(str(rank))]))
