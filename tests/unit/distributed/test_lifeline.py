"""Whoever finds a rank silent ends, and says which; nobody else does."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed import lifeline
from sdp_deepspeed.distributed.lifeline import Lifeline

LIMIT = 10.0
LOOK = 2.0  # seconds
SILENT = "nothing was heard of rank {} for 10 seconds"


def of_ranks(size: int, end: Callable[[str], None] = lambda why: None) -> list[Lifeline]:
    store: Any = dist.HashStore()
    return [Lifeline(store, rank=rank, size=size, limit=LIMIT, end=end) for rank in range(size)]


def rounds(lines: list[Lifeline], num: int) -> list[list[str | None]]:
    """What the looks of these ranks say, in as many rounds."""
    return [[line.look(LOOK) for line in lines] for _ in range(num)]


def test_ranks_that_live_are_left_alone() -> None:
    assert set(itertools.chain(*rounds(of_ranks(4), 20))) == {None}


def test_a_silent_rank_is_named_on_all_ranks_after_the_limit_and_not_before() -> None:
    zero, one, two = of_ranks(3)
    rounds([zero, one, two], 3)
    said = rounds([zero, one], 6)
    assert said[:4] == [[None, None]] * 4
    assert all(SILENT.format("2") in (why or "") for why in said[5]), said


def test_all_silent_ranks_are_named() -> None:
    lines = of_ranks(4)
    rounds(lines, 2)
    assert SILENT.format("2, 3") in str(rounds(lines[:2], 6)[-1])


def test_rank_0_is_missed_by_each_of_the_others() -> None:
    zero, one, two = of_ranks(3)
    rounds([zero, one, two], 3)
    assert all(SILENT.format("0") in (why or "") for why in rounds([one, two], 6)[-1])


def test_a_rank_that_speaks_again_in_time_is_forgiven() -> None:
    zero, one = of_ranks(2)
    for _ in range(5):
        rounds([zero, one], 1)
        assert rounds([zero], 4) == [[None]] * 4


def test_a_rank_that_has_not_begun_is_not_missed() -> None:
    zero, one, _ = of_ranks(3)
    assert rounds([zero, one], 20)[-1] == [None, None]


def test_a_rank_that_left_is_not_missed() -> None:
    zero, one, two = of_ranks(3)
    rounds([zero, one, two], 2)
    two._leave()
    assert rounds([zero, one], 20)[-1] == [None, None]
    assert not zero.is_alone
    one._leave()
    rounds([zero], 1)
    assert zero.is_alone


class Told:
    """What a process says when it ends, which it does not do here."""

    def __init__(self) -> None:
        self.why: list[str] = []
        self.came = threading.Event()

    def __call__(self, why: str) -> None:
        self.why.append(why)
        self.came.set()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lifeline, "GRACE_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_store_that_does_not_answer_ends_the_process() -> None:
    released = threading.Event()

    class Stuck:
        def set(self, key: str, value: bytes) -> None: ...

        def check(self, keys: list[str]) -> bool:
            released.wait()
            return False

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return []

    store: Any = Stuck()
    told = Told()
    line = Lifeline(store, rank=1, size=2, limit=0.05, end=told)
    line.start()
    assert told.came.wait(20)
    assert "rank 0's store has not answered" in told.why[0]
    line.close()
    released.set()


class Gone(RuntimeError):
    """What a store raises whose process has ended."""


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("said_so", [False, True])
def test_a_store_that_is_gone_ends_the_process_unless_rank_0_had_left(said_so: bool) -> None:
    inner: Any = dist.HashStore()
    asked = threading.Event()

    class Breaking:
        gone = False

        def __getattr__(self, name: str) -> Any:
            if self.gone:
                asked.set()
                raise Gone
            return getattr(inner, name)

    store: Any = Breaking()
    told = Told()
    zero = Lifeline(inner, rank=0, size=2, limit=LIMIT, end=told)
    one = Lifeline(store, rank=1, size=2, limit=LIMIT, end=told)
    zero.look(LOOK)
    one.look(LOOK)
    if said_so:
        inner.set("0", b"left")
        one.look(LOOK)
    store.gone = True
    one._beats()
    assert bool(told.why) != said_so
    assert said_so or "rank 0 ended" in told.why[0]


@pytest.mark.usefixtures("quick")
def test_the_error_that_ends_a_rank_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    zero, one = of_ranks(2, told)
    monkeypatch.setattr(sys, "last_value", ArithmeticError("on purpose"), raising=False)
    for line in (zero, one):
        line.start()
    one._at_exit()
    assert told.came.wait(20)
    assert told.why == ["rank 1 failed: ArithmeticError: on purpose"]
