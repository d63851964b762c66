"""Whoever finds a rank silent ends, and says which; nobody else does."""

from __future__ import annotations

import gc
import io
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed import lifeline
from sdp_deepspeed.distributed.lifeline import Lifeline

pytestmark = pytest.mark.slow

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


@pytest.mark.usefixtures("quick")
def test_the_last_error_of_a_notebook_has_not_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, one = of_ranks(2, Told())
    monkeypatch.setattr(sys, "last_value", ArithmeticError("an hour ago"), raising=False)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    one.start()
    one._at_exit()
    assert one.failure() is None


@pytest.mark.usefixtures("quick")
def test_rank_0_leaves_when_all_others_have_seen_it() -> None:
    """One that holds Python's lock for many beats sees it late; the store goes with rank 0."""
    store: Any = dist.HashStore()
    told = Told()
    zero, one = (Lifeline(store, rank=rank, size=2, limit=LIMIT, end=told) for rank in range(2))
    one._show()
    zero.start()
    zero.close()
    zero._unanswered = LIMIT / 2  # as after a while; asking the others begins anew
    until = time.monotonic() + 20
    while zero._unanswered > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert not zero._closed.wait(0.3)
    assert zero._unanswered < 1
    assert not told.why
    one.look(LOOK)
    assert one.is_alone
    one._leave()
    assert zero._closed.wait(20)


def over(store: Any) -> Any:
    """What `watch_ranks` asks of torch.distributed."""
    return SimpleNamespace(
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store), PrefixStore=dist.PrefixStore
    )


class OneAfterTheOther:
    """One of two ranks, which gather in one thread: of the other it knows what rank 0 said before."""

    size = 2

    def __init__(self, rank: int, said: list[Any]) -> None:
        self.rank, self._said = rank, said

    def gather_objects(self, value: object) -> list[Any]:
        self._said.append(value)
        return self._said


class Owner:
    """Who is watched."""


def watch_two(owners: Iterable[object], stores: Iterable[Any]) -> None:
    said: list[Any] = []
    for rank, (owner, store) in enumerate(zip(owners, stores, strict=True)):
        lifeline.watch_ranks(owner, over(store), OneAfterTheOther(rank, said), LIMIT)


def test_the_store_lives_until_rank_0_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine may be the last that has it, after `destroy_process_group`."""
    monkeypatch.setattr(lifeline, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(lifeline, "GRACE_SECONDS", 0.05)
    told = Told()
    monkeypatch.setattr(Lifeline, "_end_process", lambda _, why: told(why))
    before = set(threading.enumerate())
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client: Any = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    owners: list[Owner | None] = [Owner(), Owner()]
    watch_two(owners, (server, client))
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name == "lifeline"]
    assert len(threads) == 4
    server = owners[0] = None
    gc.collect()
    for thread in threads:
        thread.join(20)
    assert not told.why


def test_ranks_that_were_restarted_find_each_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a store that still has what those before them wrote."""
    made: list[Any] = []
    monkeypatch.setattr(Lifeline, "start", lambda self, *_: made.append(self._store))
    store: Any = dist.HashStore()
    owner = Owner()
    for _ in range(2):
        watch_two((owner, owner), (store, store))
    made[3].set("key", b"value")
    assert [own.check(["key"]) for own in made] == [False, False, True, True]


def test_what_was_printed_goes_out_before_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a file or a pipe it waits in a buffer, which `os._exit` drops."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file))
    out: list[bytes] = []
    monkeypatch.setattr("os._exit", lambda code: out.append(file.getvalue()))
    print("loss 3.0")
    of_ranks(2)[1]._end_process("why")
    assert out == [b"loss 3.0\n"]
