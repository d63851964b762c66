"""All-to-alls in pairs: what gloo's own gives, with all receives posted before the first send."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.receive_first import ReceiveFirst
from tests.helpers.threads import Ranks, ThreadGroup, in_threads

SIZE = 3


class Pairs(ThreadGroup):
    """A thread's group, with messages too."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group, self.sent = group._group, []

    def isend(self, tensor: torch.Tensor, rank: int, group: None, tag: int) -> Any:
        return self._group.send([tensor], rank, tag)

    def irecv(self, tensor: torch.Tensor, rank: int, group: None, tag: int) -> Any:
        return self._group.recv([tensor], rank, tag)


@pytest.fixture(scope="module")
def groups() -> list[Pairs]:
    return [Pairs(group) for group in Ranks(SIZE).groups]


def splits(seed: int) -> list[list[int]]:
    """Elements from each rank to each; some send nothing, some to themselves."""
    return torch.randint(0, 5, (SIZE, SIZE), generator=torch.Generator().manual_seed(seed)).tolist()


def values(seed: int, rank: int) -> torch.Tensor:
    return torch.arange(sum(splits(seed)[rank])) + 100 * rank + 1000 * seed


def start(dist: Any, rank: int, seed: int) -> tuple[torch.Tensor, Any]:
    received_splits = [row[rank] for row in splits(seed)]
    received = torch.full((sum(received_splits),), -1)
    work = Communicator(dist).all_to_all(received, values(seed, rank), received_splits, splits(seed)[rank])
    return received, work


def test_they_bring_what_gloo_brings(groups: list[Pairs]) -> None:
    """Several at a time, waited for in another order."""

    def work(rank: int) -> None:
        running = [start(ReceiveFirst(groups[rank], range(SIZE)), rank, seed) for seed in range(8)]
        for seed in reversed(range(8)):
            received, work = running[seed]
            work.wait()
            parts = [values(seed, peer).split(splits(seed)[peer])[rank] for peer in range(SIZE)]
            assert torch.equal(received, torch.cat(parts)), (seed, rank)
            expected, work = start(groups[rank], rank, seed)
            work.wait()
            assert torch.equal(received, expected)

    in_threads(work, SIZE)


def test_waiting_in_slices_ends_nothing(groups: list[Pairs]) -> None:
    """Time runs out for a rank that waits for another, and later all arrives."""
    has_waited = threading.Event()

    def work(rank: int) -> None:
        if rank:
            assert has_waited.wait(240)
        received, work = start(ReceiveFirst(groups[rank], range(SIZE)), rank, 0)
        if not rank:
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out|failed to complete"):
                work.wait(timedelta(milliseconds=50))
            assert not work.is_completed()
            has_waited.set()
        work.wait(timedelta(seconds=240))
        assert work.is_completed()
        assert received.tolist() == torch.cat([values(0, p).split(splits(0)[p])[rank] for p in range(SIZE)]).tolist()

    in_threads(work, SIZE)


def test_receives_come_first_and_only_where_something_comes() -> None:
    """By the ranks' numbers among all; the collective that says when they are over has no data, and comes last."""
    dist = mock.Mock(get_rank=lambda group: 1)
    received, sent = torch.zeros(3), torch.arange(7.0)
    pairs = ReceiveFirst(dist, [4, 6, 8])
    work = pairs.all_to_all_single(received, sent, [1, 2, 0], [0, 2, 5], group=None, async_op=True)
    calls = [(name, *arguments) for name, arguments, _ in dist.mock_calls]
    assert [(name, *rest[1:2]) for name, *rest in calls[:2]] == [("irecv", 4), ("isend", 8)]
    assert [call[1].tolist() for call in calls[:2]] == [[0.0], [2.0, 3.0, 4.0, 5.0, 6.0]]
    assert received.tolist() == [0.0, 0.0, 1.0], "what a rank has for itself is there at once"
    assert [(name, *rest[2:]) for name, *rest in calls[2:]] == [("all_to_all_single", [0, 0, 0], [0, 0, 0])]
    assert [part.numel() for part in calls[2][1:3]] == [0, 0]
    work.wait()
    for start in (dist.irecv, dist.isend, dist.all_to_all_single):
        start.return_value.wait.assert_called_once_with()


def test_other_devices_go_the_backend_s_way() -> None:
    dist = mock.Mock(get_rank=lambda group: 0)
    received, sent = torch.zeros(2, device="meta"), torch.zeros(2, device="meta")
    ReceiveFirst(dist, [0, 1]).all_to_all_single(received, sent, [1, 1], [1, 1], group=None, async_op=True)
    dist.all_to_all_single.assert_called_once_with(received, sent, [1, 1], [1, 1], group=None, async_op=True)
    dist.isend.assert_not_called()
