"""Objects of all ranks through a store; a rank that does something else, or nothing, is named."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.store_gatherer import StoreGatherer
from tests.helpers.threads import in_threads


def gatherer(store: Any, rank: int, size: int = 3, *, seconds: float = 20.0, **options: Any) -> StoreGatherer:
    return StoreGatherer(store, "here", (rank, size), what="the start", seconds=seconds, **options)


def test_objects_in_rank_order_round_after_round() -> None:
    store: Any = dist.HashStore()

    def work(rank: int) -> Any:
        own = gatherer(store, rank)
        return own.gather_objects(rank), own.gather_objects({"of": rank})

    assert in_threads(work, 3) == [([0, 1, 2], [{"of": 0}, {"of": 1}, {"of": 2}])] * 3


def test_an_error_of_one_rank_is_everybodys() -> None:
    store: Any = dist.HashStore()

    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("it is wrong")

    def work(rank: int) -> None:
        with pytest.raises(ValueError, match=r"it is wrong \[on rank 1\]"):
            run_on_all_ranks(gatherer(store, rank), lambda: fail(rank))

    in_threads(work, 3)


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_does_something_else_is_named(first: bool) -> None:
    store: Any = dist.HashStore()

    def work(rank: int) -> None:
        own = gatherer(store, rank)
        if rank == 2:
            own.leave("went home")
        else:
            with pytest.raises(RuntimeError, match="the start: rank 2 went home"):
                own.gather_objects(rank)

    if first:
        gatherer(store, 2).leave("went home")
    in_threads(work, 2 if first else 3)


def test_a_rank_that_does_not_come_is_named() -> None:
    store: Any = dist.HashStore()

    def work(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"the start: rank 2 did not come within 0 seconds"):
            gatherer(store, rank, seconds=0.05).gather_objects(rank)

    in_threads(work, 2)


class GoesWithItsKeeper:
    """A store as two ranks see it. Rank 0 keeps it and is in a hurry; rank 1 is slow: it reads when rank 0 has read and
    waits for something else or has left, and asks for more only when rank 0 has left."""

    def __init__(self) -> None:
        self._store: Any = dist.HashStore()
        self._has_read = [False, False]
        self._is_asked_again = threading.Event()  # by rank 0
        self._is_gone = threading.Event()

    def leave(self) -> None:
        self._is_gone.set()
        self._is_asked_again.set()

    def of(self, rank: int) -> Any:
        def ask(name: str, *args: Any) -> Any:
            if self._is_gone.is_set():
                raise ConnectionError("the store is gone")
            return getattr(self._store, name)(*args)

        def multi_get(keys: list[str]) -> list[bytes]:
            if rank == 1:
                assert self._is_asked_again.wait(240), "rank 0 neither waits nor leaves"
            values: list[bytes] = ask("multi_get", keys)
            self._has_read[rank] = True
            return values

        def check(keys: list[str]) -> bool:
            if self._has_read[rank]:
                self._is_asked_again.set()
                assert rank == 0 or self._is_gone.wait(240), "rank 0 does not leave"
            return bool(ask("check", keys))

        asked = {name: partial(ask, name) for name in ("set", "get", "add")}
        return SimpleNamespace(multi_get=multi_get, check=check, **asked)


def test_the_rank_that_keeps_the_store_leaves_last() -> None:
    """Others ask for nothing after that: an error of all ranks ends its process at once."""
    store = GoesWithItsKeeper()

    def work(rank: int) -> Any:
        try:
            return gatherer(store.of(rank), rank, size=2).gather_objects(rank)
        finally:
            if rank == 0:
                store.leave()

    assert in_threads(work, 2) == [[0, 1]] * 2


def test_a_rank_that_is_late_is_named_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp_deepspeed.distributed.store_gatherer._NOTICE_SECONDS", 0.0)
    store: Any = dist.HashStore()
    said: list[str] = []
    with pytest.raises(RuntimeError):
        gatherer(store, 1, seconds=0.05, notify=said.append).gather_objects(1)
    assert said == ["the start: waiting for rank 0, 2"]
