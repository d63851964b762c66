"""Who waits in vain says for whom, and what that rank did last."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed import last_acts
from sdp_deepspeed.distributed.last_acts import LastActs

BROKEN = "Connection closed by peer"


class Failing:
    """A collective that breaks."""

    def wait(self, *_: Any) -> None:
        raise RuntimeError(BROKEN)

    def is_completed(self) -> bool:
        return True


class Endless:
    """A collective that nobody joins, until `done` says so."""

    def __init__(self, done: Callable[[], bool] = lambda: False) -> None:
        self._done = done

    def wait(self, timeout: timedelta) -> None:
        time.sleep(0.01)
        if not self._done():
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_acts, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(last_acts, "SETTLED_SECONDS", 0.0)


def of_ranks(size: int, said: list[str] | None = None) -> list[LastActs]:
    store: Any = dist.HashStore()
    warn = ([] if said is None else said).append
    return [LastActs(store, rank=rank, ranks=range(size), warn=warn) for rank in range(size)]


def test_the_thread_has_ended_when_its_owner_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a process's exit too: it must not be in the store then."""
    monkeypatch.setattr(last_acts, "BEAT_SECONDS", 60.0)  # it looks at nothing meanwhile
    before = set(threading.enumerate())
    [own] = of_ranks(1)
    own.start()
    [thread] = set(threading.enumerate()) - before
    del own
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.parametrize("in_slices", [False, True])
def test_a_collective_that_breaks_says_what_the_others_did(in_slices: bool) -> None:
    zero, one, two = of_ranks(3)
    zero.note("began its step")
    with pytest.raises(ArithmeticError), one.doing("its step"):
        raise ArithmeticError("on purpose")
    two._waits_since, two._call = time.time(), 7  # as zero
    two.publish()
    words = r"Connection closed by peer\nrank 0 waited \(began its step\) for rank 1, which began its step: "
    with pytest.raises(
        RuntimeError, match=words + r"ArithmeticError: on purpose since 0 seconds\. All ranks must call"
    ):
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


def test_ranks_that_wait_for_one_another_end() -> None:
    zero, one = of_ranks(2)
    one.note("began its backward pass")
    one._waits_since, one._call = time.time() - 1, 4
    one.publish()
    with pytest.raises(RuntimeError, match="for rank 1, which began its backward pass and waits since 1 seconds"):
        zero.wait(Endless(), 5, in_slices=True)
    one._waits_since = None
    with pytest.raises(RuntimeError, match="for rank 0, which built its engine"):  # it has given up
        one.wait(Endless(), 4, in_slices=True)


@pytest.mark.parametrize("how", ["elsewhere", "in the same", "not for long", "long ago"])
def test_who_may_still_come_is_waited_for(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    zero, one = of_ranks(2)
    now = time.time()
    one._waits_since = None if how == "elsewhere" else now + 1 if how == "not for long" else now - 1
    one._call = 5 if how == "in the same" else 4
    one.publish()
    if how == "long ago":
        monkeypatch.setattr(last_acts, "BEAT_SECONDS", 0.0)
    looks = iter([False, False, True])
    zero.wait(Endless(lambda: next(looks)), 5, in_slices=True)
    assert not zero._own().waits


def test_the_thread_publishes_notices_once_and_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_acts, "NOTICE_SECONDS", 0.02)
    said: list[str] = []
    zero, one = of_ranks(2, said)
    one.note("began a long evaluation")
    one.publish()
    zero.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "last-acts"]
    end = time.monotonic() + 10
    zero.wait(Endless(lambda: bool(said) or time.monotonic() > end), 1, in_slices=True)
    assert [text for text in said if "for rank 1, which began a long evaluation" in text] == said != []
    (of_zero,) = one._others().values()
    assert of_zero is not None
    assert of_zero.what == "built its engine"
    del zero
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
