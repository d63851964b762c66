"""Who waits in vain says for whom, and what that rank did last."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed import last_acts
from sdp_deepspeed.distributed.last_acts import LastActs, make_last_acts
from tests.helpers.last_acts import of_ranks, threads, waiting

pytestmark = pytest.mark.slow

BROKEN = "Connection closed by peer"


class Failing:
    """A collective that breaks."""

    def wait(self, *_: Any) -> None:
        raise RuntimeError(BROKEN)

    def is_completed(self) -> bool:
        return True


class Endless:
    """A collective that nobody joins, until `done` says so; it is asked after each slice of waiting."""

    def __init__(self, done: Callable[[], bool] = lambda: False) -> None:
        self._done = done
        self._slices = 0

    def wait(self, timeout: timedelta) -> None:
        self._slices += 1
        assert self._slices < 5000, "nobody looked whether it can come"
        if not self._done():
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_acts, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(last_acts, "SETTLED_SECONDS", 0.0)


def test_the_thread_has_ended_when_its_owner_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a process's exit too: it must not be in the store then."""
    monkeypatch.setattr(last_acts, "BEAT_SECONDS", 60.0)  # it looks at nothing meanwhile
    monkeypatch.setattr(last_acts, "_LAST_BEAT_SECONDS", 10.0)  # on a busy machine it may get no turn for long
    before = threads()
    [own] = of_ranks(1)
    own.start()
    [thread] = threads() - before
    del own
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.parametrize("in_slices", [False, True])
def test_a_collective_that_breaks_says_what_the_others_did(in_slices: bool) -> None:
    zero, one, two = of_ranks(3)
    zero.note("began its step")
    with pytest.raises(ArithmeticError), one.doing("its step"):
        raise ArithmeticError("on purpose\nand what all others did")
    two.note("began its step")
    with waiting(two, 7):  # as zero
        two.publish()
    words = r"Connection closed by peer\nrank 0 waited \(began its step\) for rank 1, which began its step: "
    words += r"ArithmeticError: on purpose, \d+ seconds before it was last heard of\. All ranks must call"
    with pytest.raises(RuntimeError, match=words):
        zero.wait(Failing(), 7, in_slices=in_slices)


def test_a_rank_of_which_nothing_is_known_is_named() -> None:
    zero, _ = of_ranks(2)
    assert "for rank 1, of which nothing is known" in zero.explain()


def test_a_store_that_is_gone() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("no store")

    acts = LastActs(Gone(), rank=0, ranks=range(2), warn=print)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"rank 0 waited \(built its engine\) for a rank that is gone"):
        acts.wait(Failing(), 1, in_slices=False)


def living(*others: LastActs) -> Callable[[], bool]:
    """Of a collective that does not come about, while these ranks go on publishing."""

    def done() -> bool:
        for acts in others:
            acts.publish()
        return False

    return done


@pytest.mark.parametrize("call", [4, 5])
def test_ranks_that_wait_for_one_another_end(call: int) -> None:
    """Also in calls of the same number, where one is in a step and the other in a backward pass."""
    zero, one = of_ranks(2)
    one.note("began its backward pass")
    words = "for rank 1, which began its backward pass and had waited [0-9]+ seconds when it was last heard of"
    with waiting(one, call), pytest.raises(RuntimeError, match=words):
        zero.wait(Endless(living(one)), 5, in_slices=True)
    with pytest.raises(RuntimeError, match="for rank 0, which built its engine"):  # it has given up
        one.wait(Endless(), call, in_slices=True)


@pytest.mark.parametrize("how", ["elsewhere", "in the same", "not for long", "silent", "unknown"])
def test_who_may_still_come_is_waited_for(how: str) -> None:
    zero, one, two = of_ranks(3)
    slices = iter([False] * 3 + [True])

    def done() -> bool:
        two.publish()
        if how != "silent":
            one.publish()
        return next(slices)

    if how == "silent":
        with waiting(one, 4):
            one.publish()
    if how == "unknown":
        one.publish = lambda: None  # type: ignore[method-assign]
    since = time.monotonic() + (60 if how == "not for long" else -1)
    with waiting(two, 5), waiting(one, 5 if how == "in the same" else 4, since=since):
        if how == "elsewhere":
            one._waiting = None
        zero.wait(Endless(done), 5, in_slices=True)
    assert not zero._own().waits


def test_who_ended_well_has_done_its_part_of_what_it_started() -> None:
    zero, one = of_ranks(2)
    call = one.launch()
    ended = threading.Event()
    ended.set()
    last_acts._beat(weakref.ref(one), ended)
    slices = iter([False] * 3 + [True])
    zero.wait(Endless(lambda: next(slices)), call, in_slices=True)
    with pytest.raises(RuntimeError, match="for rank 1, which built its engine"):
        zero.wait(Endless(lambda: False), call + 1, in_slices=True)


@pytest.mark.parametrize("hours", [-9, 9])
def test_no_clocks_of_two_ranks_are_compared(hours: int) -> None:
    """Another host's clock may be hours away; its rank waits all the same, and is not taken for one that is gone."""
    zero, one = of_ranks(2)
    publish = one.publish

    def on_another_host() -> None:
        there = time.monotonic() + 3600.0 * hours
        clock = SimpleNamespace(monotonic=lambda: there)
        with mock.patch.object(last_acts, "time", clock), waiting(one, 4, since=there - 1):
            publish()

    one.publish = on_another_host  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="for rank 1, which built its engine and had waited 1 seconds"):
        zero.wait(Endless(living(one)), 5, in_slices=True)


def test_two_questions_however_many_ranks_there_are() -> None:
    store = mock.Mock(wraps=dist.HashStore())
    acts = [LastActs(store, rank=rank, ranks=range(512), warn=print) for rank in range(512)]
    for own in acts:
        own.publish()
    store.reset_mock()
    others = acts[7]._others()
    assert [name for name, *_ in store.method_calls] == ["check", "multi_get"]
    assert [rank for rank in range(512) if others.get(rank) is None] == [7]


@pytest.mark.parametrize(
    ("calls", "speaker"),
    [
        ([None, 5, 5, 5], 1),  # the one for which all wait says nothing
        ([4, 5, 5, 5], 1),  # also where it waits elsewhere
        ([5, 5, 4, None], 0),
        ([None, 4, 5, None], 1),
    ],
)
def test_one_rank_warns(calls: list[int | None], speaker: int) -> None:
    said: list[str] = []
    everyone = of_ranks(len(calls), said)
    for acts, call in zip(everyone, calls, strict=True):
        acts._waiting = None if call is None else last_acts._Waiting(call, time.monotonic(), next_look=0.0)
        acts.publish()
    for acts in (*everyone, *everyone):
        acts.look()
    assert [text.partition(" waited")[0] for text in said] == [f"rank {speaker}"]


def test_where_the_one_that_should_warn_is_gone_the_next_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_acts, "NOTICE_SECONDS", 0.0)
    said: list[str] = []
    everyone = of_ranks(4, said)
    for acts in everyone[:3]:
        acts._waiting = last_acts._Waiting(5, time.monotonic(), next_look=0.0)
    everyone[0].publish()
    for _ in range(3):
        for acts in everyone[1:3]:
            acts.look()
    [text] = said
    assert text.startswith("rank 1 waited (built its engine) for rank 3, of which nothing is known")


def test_an_error_is_not_replaced_by_what_came_before_it() -> None:
    """The thread may have put its words together just before."""
    (own,) = of_ranks(1)
    stored: list[str] = []

    def store(key: str, value: bytes) -> None:
        if "failed" not in str(value):  # in the middle of it the rank fails
            failing.start()
            failing.join(0.05)
        stored.append(str(value))

    def fail() -> None:
        own.note("failed")
        own.publish()

    failing = threading.Thread(target=fail)
    own._store = SimpleNamespace(set=store)
    own.publish()
    failing.join()
    assert ["failed" in value for value in stored] == [False, True]


def test_what_has_come_meanwhile_is_not_told() -> None:
    said: list[str] = []
    zero, one = of_ranks(2, said)
    one.publish()
    with waiting(zero, 5), mock.patch.object(zero, "_own", one._own):  # which does not wait
        zero.look()
    assert said == []


def test_the_thread_publishes_notices_once_and_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_acts, "NOTICE_SECONDS", 0.02)
    said: list[str] = []
    zero, one = of_ranks(2, said)
    one.note("began a long evaluation")
    one.publish()
    before = threads()
    zero.start()
    [thread] = threads() - before
    end = time.monotonic() + 10

    def done() -> bool:
        time.sleep(0.01)
        return bool(said) or time.monotonic() > end

    zero.wait(Endless(done), 1, in_slices=True)
    assert [text for text in said if "for rank 1, which began a long evaluation" in text] == said != []
    (of_zero,) = one._others().values()
    assert of_zero is not None
    assert of_zero.what == "built its engine"
    del zero
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_each_engine_of_a_group_has_keys_of_its_own_and_is_heard_of_at_once() -> None:
    store: Any = dist.HashStore()
    group = SimpleNamespace(group_name="7")

    def of_rank(rank: int) -> LastActs:
        torch_distributed = SimpleNamespace(
            get_rank=lambda: rank,
            get_process_group_ranks=lambda group: [2, 5],
            distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
            PrefixStore=dist.PrefixStore,
        )
        return make_last_acts(torch_distributed, group, print)

    first, second = [[of_rank(rank) for rank in (2, 5)] for _ in range(2)]
    first[1].note("began its step")
    first[1].publish()
    assert [own[0]._others()[5].what for own in (first, second)] == [  # type: ignore[union-attr]
        "began its step",
        "built its engine",
    ]
