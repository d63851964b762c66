"""A rank that waits alone gives up as soon as it is certain that the others do not come, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from sdp_deepspeed.distributed import monitored_barrier
from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.monitored_barrier import MonitoredBarrier, Phase

SECONDS = 0.02
ADVICE = r"did not come: all ranks do this together: call it on every rank.* Last seen: rank 1 began its step"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_barrier, "LOOK_SECONDS", SECONDS)


class Ranks:
    """Three ranks whose messages arrive when the test says so.

    Args:
        in_barrier: of rank 1.
    """

    def __init__(self, in_barrier: Callable[[], bool] = lambda: False) -> None:
        self.size, self.rank = 3, 0
        self.arrived = threading.Event()
        self._store: Any = dist.HashStore()
        ranks = range(self.size)
        self.acts = [
            LastActs(self._prefixed("acts"), rank=rank, ranks=ranks, warn=print, in_barrier=in_barrier)
            for rank in ranks
        ]

    def _prefixed(self, name: str) -> Any:
        return dist.PrefixStore(name, self._store)

    def gather_objects(self, value: Any) -> list[Any]:
        assert self.arrived.wait(20)
        return [value] * self.size

    def barrier(self, rank: int) -> MonitoredBarrier:
        channel = Ranks()
        channel.rank, channel.arrived = rank, self.arrived
        return MonitoredBarrier(channel, self._prefixed("barrier"), self.acts[rank])

    def come(self, rank: int) -> None:
        """Another rank enters its first meeting, and stays there."""
        self._prefixed("barrier").set(str(rank), b"1")

    def train(self, rank: int) -> None:
        """Another rank starts a collective of a training step."""
        self.acts[rank].note("began its step")
        self.acts[rank].launch()
        self.acts[rank].publish()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.arrived.set()


def arriving(ranks: Ranks, looks: int = 10) -> threading.Timer:
    """Messages come after so many looks."""
    timer = threading.Timer(SECONDS * looks, ranks.arrived.set)
    timer.start()
    return timer


def test_who_trains_instead_is_not_waited_for(ranks: Ranks) -> None:
    ranks.come(2)
    ranks.train(1)
    words = r"rank 0 asked for the whole dense model and waited for rank 1, which " + ADVICE
    with pytest.raises(RuntimeError, match=words):
        ranks.barrier(0).wait(Phase.RESIDENT)
    with pytest.raises(RuntimeError, match="rank 2 asked for the whole dense model and waited for rank 1"):
        ranks.barrier(2).wait(Phase.RESIDENT)  # it waits for rank 0's message
    assert "for rank 0, which asked for the whole dense model: waited for rank 1" in ranks.acts[1].explain()
    assert list(ranks.acts[1].elsewhere([0, 2])) == [0, 2]


def test_who_came_and_trains_since_is_waited_for(ranks: Ranks) -> None:
    """The message is on its way."""
    for other in (1, 2):
        ranks.come(other)
        ranks.train(other)
    arriving(ranks)
    assert ranks.barrier(0).wait(Phase.FORWARD, "note") == ["note"] * 3


def test_who_has_done_as_much_is_waited_for(ranks: Ranks) -> None:
    """It loads data, say."""
    for rank in range(3):
        ranks.train(rank)
    arriving(ranks)
    assert ranks.barrier(0).wait(Phase.FORWARD) == [None] * 3


def test_who_waits_in_a_barrier_of_all_ranks_is_not_waited_for() -> None:
    ranks = Ranks(in_barrier=lambda: True)
    ranks.come(2)
    ranks.acts[1].publish()
    words = r"waited for rank 1, .* Last seen: rank 1 built its engine and waits in torch\.distributed\.barrier\(\)"
    with pytest.raises(RuntimeError, match=words):
        ranks.barrier(0).wait(Phase.RESIDENT)
    ranks.arrived.set()


def test_who_leaves_a_barrier_is_waited_for() -> None:
    found = [True] * 2
    ranks = Ranks(in_barrier=lambda: bool(found and found.pop()))
    own = ranks.acts[0]
    elsewhere = own.elsewhere

    def looking(others: Any) -> Any:
        ranks.acts[1].publish()
        return elsewhere(others)

    own.elsewhere = looking  # type: ignore[method-assign]
    arriving(ranks)
    assert ranks.barrier(0).wait(Phase.RESIDENT) == [None] * 3
    assert not found


def test_without_a_store_the_message_decides(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = ranks.barrier(0)

    def gone(*_: Any) -> Any:
        raise RuntimeError("no store")

    monkeypatch.setattr(ranks.acts[0], "elsewhere", gone)
    arriving(ranks)
    assert barrier.wait(Phase.FORWARD) == [None] * 3


def test_ranks_in_different_phases_are_named(ranks: Ranks) -> None:
    barrier = ranks.barrier(0)
    ranks.arrived.set()
    said = [(int(Phase.FORWARD), None), (int(Phase.LEAVE), None), (int(Phase.FORWARD), None)]
    barrier._channel.gather_objects = lambda value: said  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"rank 1 ended its evaluation .*; rank 0, 2 began a forward pass"):
        barrier.wait(Phase.FORWARD)
