"""Objects of all ranks through a store; a rank that does something else, or nothing, is named."""

from __future__ import annotations

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


def test_a_rank_that_is_late_is_named_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdp_deepspeed.distributed.store_gatherer._NOTICE_SECONDS", 0.0)
    store: Any = dist.HashStore()
    said: list[str] = []
    with pytest.raises(RuntimeError):
        gatherer(store, 1, seconds=0.05, notify=said.append).gather_objects(1)
    assert said == ["the start: waiting for rank 0, 2"]
