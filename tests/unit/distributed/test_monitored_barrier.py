"""A rank that waits alone gives up as soon as it is certain that the others do not come, and not before."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed import last_acts, monitored_barrier
from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.monitored_barrier import Meetings, MonitoredBarrier, Phase

pytestmark = pytest.mark.slow

SECONDS = 0.02
ADVICE = r"did not come: all ranks do this together: call it on every rank.* Last seen: rank 1 began its step"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_barrier, "LOOK_SECONDS", SECONDS)


class Ranks:
    """Three ranks that come when the test says so."""

    def __init__(self) -> None:
        self._store: Any = dist.HashStore()
        self.acts = [LastActs(self._prefixed("acts"), rank=rank, ranks=range(3), warn=print) for rank in range(3)]
        self.gone: set[int] = set()
        self._came = Counter[int]()
        self._began = time.monotonic()
        self.warnings: list[str] = []

    def _prefixed(self, name: str) -> Any:
        return dist.PrefixStore(name, self._store)

    def barrier(self, rank: int, said: list[tuple[int, Any]] | None = None) -> MonitoredBarrier:
        channel: Any = SimpleNamespace(
            rank=rank, size=3, gather_objects=lambda value: said or [value] * 3, is_gone=self.gone.__contains__
        )
        limit: Any = SimpleNamespace(total_seconds=self._patience)
        warn = self.warnings.append
        return MonitoredBarrier(channel, self._prefixed("barrier"), self.acts[rank], limit=limit, warn=warn)

    def _patience(self) -> float:
        assert time.monotonic() - self._began < 20, "nothing but the limit ended it"
        return math.inf

    def come(self, *ranks: int) -> None:
        """Others enter their next meeting."""
        for rank in ranks:
            self._came[rank] += 1
            self._prefixed("barrier").set(str(rank), str(self._came[rank]).encode())
            self._prefixed("barrier").add("came", 1)

    def train(self, rank: int) -> None:
        """Another rank starts a collective of a training step."""
        self.acts[rank].note("began its step")
        self.acts[rank].launch()
        self.acts[rank].publish()

    def come_later(self) -> None:
        """All others that have not come yet, after some looks."""
        late = [rank for rank in (1, 2) if self._came[rank] == min(self._came[other] for other in (1, 2))]
        threading.Timer(SECONDS * 10, self.come, late).start()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_who_trains_instead_is_not_waited_for(ranks: Ranks) -> None:
    ranks.train(1)
    words = r"rank 0 asked for the whole dense model and waited for rank 1, 2, which " + ADVICE
    with pytest.raises(RuntimeError, match=words):
        ranks.barrier(0).wait(Phase.RESIDENT)
    with pytest.raises(RuntimeError, match="rank 2 asked for the whole dense model and waited for rank 1"):
        ranks.barrier(2).wait(Phase.RESIDENT)  # it looks for rank 0 alone, and hears
    assert "for rank 0, which asked for the whole dense model: waited for rank 1, 2" in ranks.acts[1].explain()
    assert list(ranks.acts[1].elsewhere([0, 2])) == [0, 2]


def test_who_came_and_trains_since_is_waited_for(ranks: Ranks) -> None:
    """It cannot leave before all have come: what it trains is older than what this rank knows."""
    ranks.come(1)
    ranks.train(1)
    ranks.come_later()
    assert ranks.barrier(0).wait(Phase.FORWARD, "note") == ["note"] * 3


def test_who_comes_while_this_rank_looks_is_waited_for(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ranks.acts[0].elsewhere

    def looking(others: Any) -> Any:
        if not ranks._came[1]:
            ranks.come(1)
            ranks.train(1)
            ranks.come_later()
        return elsewhere(others)

    monkeypatch.setattr(ranks.acts[0], "elsewhere", looking)
    assert ranks.barrier(0).wait(Phase.FORWARD) == [None] * 3


def test_who_has_done_as_much_is_waited_for(ranks: Ranks) -> None:
    """It loads data, say."""
    for rank in range(3):
        ranks.train(rank)
    ranks.come_later()
    assert ranks.barrier(0).wait(Phase.FORWARD) == [None] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_of_those_who_wait_says_once_for_whom(
    ranks: Ranks, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 may wait for this one in a collective that nobody here knows of."""
    monkeypatch.setattr(monitored_barrier, "NOTICE_SECONDS", SECONDS)
    monkeypatch.setattr(ranks, "_patience", lambda: 300.0)
    ranks.acts[1].publish()
    ranks.come(2 if rank == 0 else 0)
    threading.Timer(SECONDS * 20, ranks.come, [1]).start()
    assert ranks.barrier(rank).wait(Phase.FORWARD) == [None] * 3
    assert len(ranks.warnings) == (rank == 0)
    for text in ranks.warnings:
        assert text.startswith(
            "rank 0 began a forward pass of the dense model and waits for rank 1: the dense model is"
        )
        assert "let all ranks enter engine.dense(resident=True)" in text
        assert text.endswith("Last seen: rank 1 built its engine (waiting goes on, for at most 300 seconds)")


def test_who_leaves_a_resident_model_is_not_told_of_batches(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may generate a long text."""
    monkeypatch.setattr(monitored_barrier, "NOTICE_SECONDS", SECONDS)
    monkeypatch.setattr(ranks, "_patience", lambda: 300.0)
    barrier = ranks.barrier(0)
    ranks.come(1, 2)
    barrier.wait(Phase.RESIDENT)
    ranks.come(2)
    threading.Timer(SECONDS * 20, ranks.come, [1]).start()
    barrier.wait(Phase.LEAVE)
    (text,) = ranks.warnings
    assert "waits for rank 1: all ranks leave engine.dense() together" in text


def test_who_comes_late_to_a_meeting_that_failed_is_told(ranks: Ranks) -> None:
    ranks.train(1)
    with pytest.raises(RuntimeError, match="rank 0 asked"):
        ranks.barrier(0).wait(Phase.RESIDENT)
    ranks.come(2)
    with pytest.raises(RuntimeError, match=r"rank 1 asked .* waited for another rank, which is gone or had given up"):
        ranks.barrier(1).wait(Phase.RESIDENT)


def test_what_the_first_rank_of_one_group_found_others_hear(ranks: Ranks) -> None:
    ranks.train(1)
    alone = LastActs(ranks._prefixed("other acts"), rank=2, ranks=[2], warn=print)
    ranks.acts[2] = alone
    assert not alone.watched
    threading.Timer(SECONDS * 5, ranks._prefixed("barrier").set, ["failed", b""]).start()
    with pytest.raises(RuntimeError, match="rank 2 asked for the whole dense model and waited for rank 0, 1"):
        ranks.barrier(2).wait(Phase.RESIDENT)


def test_each_meeting_waits_for_all_again(ranks: Ranks) -> None:
    barrier = ranks.barrier(0)
    for _ in range(2):
        ranks.come_later()
        assert barrier.wait(Phase.FORWARD) == [None] * 3
    ranks.train(1)
    with pytest.raises(RuntimeError, match=r"rank 0 ended its evaluation .* waited for rank 1, 2, which"):
        barrier.wait(Phase.LEAVE)


def test_a_rank_that_never_comes_is_given_up(ranks: Ranks) -> None:
    barrier = ranks.barrier(0)
    barrier._limit = timedelta(seconds=0.1)
    ranks.come(2)
    with pytest.raises(RuntimeError, match=r"waited for rank 1, which did not come: .*same number of batches"):
        barrier.wait(Phase.FORWARD)


def test_a_process_that_ends_is_not_waited_for(ranks: Ranks) -> None:
    ranks.come(2)
    ended = threading.Event()
    ended.set()
    last_acts._beat(weakref.ref(ranks.acts[1]), ended)
    with pytest.raises(RuntimeError, match="waited for rank 1, which did not come"):
        ranks.barrier(0).wait(Phase.FORWARD)


def test_a_process_that_was_killed_is_not_waited_for(ranks: Ranks) -> None:
    """It cannot say that it ended."""
    ranks.gone.add(1)
    ranks.come(2)
    with pytest.raises(RuntimeError, match="waited for rank 1, which did not come"):
        ranks.barrier(0).wait(Phase.FORWARD)


def test_who_came_and_ended_since_is_not_missed(ranks: Ranks) -> None:
    """Its error is told where its message is missing; who is on its way is waited for."""
    ranks.come(1)
    ranks.gone.add(1)
    ranks.come_later()
    assert ranks.barrier(0).wait(Phase.FORWARD) == [None] * 3


def test_a_store_that_is_gone_with_its_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = ranks.barrier(1)
    gone = mock.Mock(**{name: mock.Mock(side_effect=RuntimeError("no store")) for name in ("set", "add", "get")})
    monkeypatch.setattr(barrier, "_store", gone)
    with pytest.raises(RuntimeError, match=r"rank 1 began a forward pass .* waited for another rank,"):
        barrier.wait(Phase.FORWARD)
    ranks.gone.add(0)
    with pytest.raises(RuntimeError, match=r"rank 1 began a forward pass .* waited for rank 0, which ended: the dense"):
        barrier.wait(Phase.FORWARD)


def test_ranks_in_different_phases_are_named(ranks: Ranks) -> None:
    phases = (Phase.FORWARD, Phase.LEAVE, Phase.FORWARD)
    barrier = ranks.barrier(0, [(int(phase), None) for phase in phases])
    ranks.come(1, 2)
    with pytest.raises(RuntimeError, match=r"rank 1 ended its evaluation .*; rank 0, 2 began a forward pass"):
        barrier.wait(Phase.FORWARD)


def test_gathering_is_a_meeting(ranks: Ranks) -> None:
    """Who fails meanwhile is named, and not waited for."""
    said = [(int(Phase.REPLAN), value) for value in "abc"]
    meetings = Meetings(ranks.barrier(0, said), Phase.REPLAN)
    assert (meetings.rank, meetings.size) == (0, 3)
    ranks.come(1, 2)
    assert meetings.gather_objects("a") == ["a", "b", "c"]
    ranks.acts[1].note("began to re-plan")
    ranks.acts[1].fail("MemoryError: on purpose")
    words = "waited for rank 1, 2, which did not come: .* Last seen: rank 1 began to re-plan: MemoryError: on purpose"
    with pytest.raises(RuntimeError, match=words):
        meetings.gather_objects("a")


def test_who_has_ended(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_barrier, "_ENDING_SECONDS", 0.3)
    barrier = ranks.barrier(2)
    assert barrier.ended_ranks() == []
    threading.Timer(SECONDS, ranks.gone.add, [1]).start()
    assert barrier.ended_ranks() == [1]
