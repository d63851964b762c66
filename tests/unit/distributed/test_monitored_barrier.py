"""A rank that waits alone gives up as soon as it is certain that the others do not come, and not before."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed import last_acts, monitored_barrier
from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.monitored_barrier import MonitoredBarrier, Phase

SECONDS = 0.02
ADVICE = r"did not come: all ranks do this together: call it on every rank.* Last seen: rank 1 began its step"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_barrier, "LOOK_SECONDS", SECONDS)


class Ranks:
    """Three ranks that come when the test says so.

    Args:
        stuck_in: of rank 1.
    """

    def __init__(self, stuck_in: Callable[[], str] = str) -> None:
        self._store: Any = dist.HashStore()
        self.acts = [
            LastActs(self._prefixed("acts"), rank=rank, ranks=range(3), warn=print, stuck_in=stuck_in)
            for rank in range(3)
        ]
        self._came = set[int]()

    def _prefixed(self, name: str) -> Any:
        return dist.PrefixStore(name, self._store)

    def barrier(self, rank: int, said: list[tuple[int, Any]] | None = None) -> MonitoredBarrier:
        channel: Any = SimpleNamespace(rank=rank, size=3, gather_objects=lambda value: said or [value] * 3)
        limit = timedelta(seconds=20)
        return MonitoredBarrier(channel, self._prefixed("barrier"), self.acts[rank], limit=limit)

    def come(self, *ranks: int) -> None:
        """Others enter their first meeting."""
        for rank in set(ranks) - self._came:
            self._came.add(rank)
            self._prefixed("barrier").set(str(rank), b"1")
            self._prefixed("barrier").add("came", 1)

    def train(self, rank: int) -> None:
        """Another rank starts a collective of a training step."""
        self.acts[rank].note("began its step")
        self.acts[rank].launch()
        self.acts[rank].publish()

    def come_later(self) -> None:
        """All others, after some looks."""
        threading.Timer(SECONDS * 10, self.come, [1, 2]).start()


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
        ranks.come(1)
        ranks.train(1)
        return elsewhere(others)

    monkeypatch.setattr(ranks.acts[0], "elsewhere", looking)
    ranks.come_later()
    assert ranks.barrier(0).wait(Phase.FORWARD) == [None] * 3


def test_who_has_done_as_much_is_waited_for(ranks: Ranks) -> None:
    """It loads data, say."""
    for rank in range(3):
        ranks.train(rank)
    ranks.come_later()
    assert ranks.barrier(0).wait(Phase.FORWARD) == [None] * 3


def test_who_waits_in_a_barrier_of_all_ranks_is_not_waited_for() -> None:
    ranks = Ranks(stuck_in=lambda: "barrier")
    ranks.come(2)
    ranks.acts[1].publish()
    words = r"waited for rank 1, .* Last seen: rank 1 built its engine and waits in torch\.distributed\.barrier\(\)"
    with pytest.raises(RuntimeError, match=words):
        ranks.barrier(0).wait(Phase.RESIDENT)


def test_who_leaves_a_collective_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it enters another."""
    found = [*["all_gather"] * (monitored_barrier._LOOKS_STUCK - 1), ""] * 2
    ranks = Ranks(stuck_in=lambda: found.pop() if found else "")
    elsewhere = ranks.acts[0].elsewhere

    def looking(others: Any) -> Any:
        if not found:
            ranks.come(1, 2)
        ranks.acts[1].publish()
        return elsewhere(others)

    monkeypatch.setattr(ranks.acts[0], "elsewhere", looking)
    assert ranks.barrier(0).wait(Phase.RESIDENT) == [None] * 3


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


def test_a_store_that_is_gone_with_its_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = ranks.barrier(1)
    gone = mock.Mock(**{name: mock.Mock(side_effect=RuntimeError("no store")) for name in ("set", "add", "get")})
    monkeypatch.setattr(barrier, "_store", gone)
    with pytest.raises(RuntimeError, match=r"rank 1 began a forward pass .* waited for another rank,"):
        barrier.wait(Phase.FORWARD)


def test_ranks_in_different_phases_are_named(ranks: Ranks) -> None:
    phases = (Phase.FORWARD, Phase.LEAVE, Phase.FORWARD)
    barrier = ranks.barrier(0, [(int(phase), None) for phase in phases])
    ranks.come(1, 2)
    with pytest.raises(RuntimeError, match=r"rank 1 ended its evaluation .*; rank 0, 2 began a forward pass"):
        barrier.wait(Phase.FORWARD)
