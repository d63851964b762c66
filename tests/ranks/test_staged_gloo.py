"""Gloo by way of host memory: every collective gives what gloo gives, when it is waited for; engines do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers import staged_gloo
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Check, Place, Rank, run_ranks

pytestmark = pytest.mark.slow


def collectives(group: Any, rank: Rank) -> Iterator[torch.Tensor]:
    """What each gives on this rank."""
    own = torch.arange(6.0) * (rank.rank + 1)
    summed, sent = own.clone().bfloat16(), own.clone()
    dist.all_reduce(summed, group=group)
    yield summed
    dist.broadcast(sent, 1, group=group)
    yield sent
    parts = [torch.zeros(6) for _ in range(rank.size)]
    dist.all_gather(parts, own, group=group)
    yield torch.stack(parts)
    whole = torch.zeros(6 * rank.size)
    dist.all_gather_into_tensor(whole, own, group=group)
    yield whole
    part = torch.zeros(3)
    dist.reduce_scatter_tensor(part, own, group=group)
    yield part
    size = (2, 4)[rank.rank]
    received = torch.zeros(2 * size)
    dist.all_to_all_single(received, own, [size, size], [2, 4], group=group)
    yield received


def is_gloo(rank: Rank) -> None:
    assert dist.get_backend() == "staged"
    gloo = dist.new_group(backend="gloo")
    staged = dist.new_group()
    for number, (one, other) in enumerate(zip(collectives(staged, rank), collectives(gloo, rank), strict=True)):
        assert torch.equal(one, other), (number, one, other)


def fills_in_when_it_is_waited_for(rank: Rank) -> None:
    """As a stream would: what is read before is not yet there, and what is sent may change once it has left."""
    received, sent = torch.zeros(2), torch.full((2,), float(rank.rank))
    work = dist.all_to_all_single(received, sent, async_op=True)
    sent.fill_(7)
    assert received.tolist() == [0, 0]
    work.wait()
    assert received.tolist() == [0, 1]
    received.fill_(5)
    work.wait()
    assert received.tolist() == [5, 5], "the second wait changes nothing"


def objects_and_messages(rank: Rank) -> None:
    values: list[Any] = [None] * rank.size
    dist.all_gather_object(values, {"rank": rank.rank})
    assert values == [{"rank": 0}, {"rank": 1}]
    tensor = torch.full((3,), float(rank.rank))
    if rank.rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    assert tensor.tolist() == [0, 0, 0]
    dist.barrier()


def late_ones_do_the_same(rank: Rank) -> None:
    """With streams that do nothing: what they do on a GPU is for test_late_streams.py."""
    case = Case(2, 1, "forward", "neuron", stage=2, overlap=True, accumulation=3, buckets="many")
    with (
        mock.patch.object(staged_gloo, "cuda", mock.MagicMock()) as cuda,
        mock.patch.object(staged_gloo.StagedGloo, "is_late", True),
    ):
        check_case(case, rank)
        num_streams, waits = cuda.Stream.call_count, cuda.current_stream().wait_stream.call_count
        assert 0 < num_streams == waits
        with mock.patch.object(staged_gloo.StagedGloo, "is_waited_for", False):
            dist.all_to_all_single(torch.empty(2), torch.ones(2))
        assert (cuda.Stream.call_count, cuda.current_stream().wait_stream.call_count) == (num_streams + 1, waits)


CHECKS: dict[str, Check] = {
    "is_gloo": is_gloo,
    "fills_in_when_it_is_waited_for": fills_in_when_it_is_waited_for,
    "objects_and_messages": objects_and_messages,
    "late_ones_do_the_same": late_ones_do_the_same,
    "forward": partial(check_case, Case(2, 1, "forward", "neuron", stage=2, overlap=True, accumulation=3)),
    "backward": partial(
        check_case, Case(2, 1, "backward", "block", "gpt2", stage=0, precision="bf16", optimizer="SGD")
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_ranks(2, list(CHECKS.items()), place=Place("staged"))


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks(outcomes: dict[str, str | None], name: str) -> None:
    assert outcomes[name] is None, outcomes[name]
