"""Small objects of all ranks or some, on threads over gloo, beside the collectives of another thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.distributed import host_group
from sdp_deepspeed.distributed.agreement import OneRank, run_on_rank_0
from sdp_deepspeed.distributed.host_group import LIMIT, Channel, HostGroup, make_host_group
from tests.helpers.threads import Ranks, in_threads

SIZE = 3


class ThreadDist:
    """What a channel calls of `torch.distributed`, for one thread."""

    def __init__(self, group: Any) -> None:
        self._gloo = group._group

    def get_rank(self) -> int:
        return int(self._gloo.rank())

    def get_world_size(self) -> int:
        return int(self._gloo.size())

    def isend(self, tensor: torch.Tensor, rank: int, group: Any, tag: int) -> Any:
        return self._gloo.send([tensor], rank, tag)

    def irecv(self, tensor: torch.Tensor, rank: int, group: Any, tag: int) -> Any:
        return self._gloo.recv([tensor], rank, tag)

    def sum(self, tensor: torch.Tensor) -> None:
        self._gloo.allreduce([tensor]).wait()


def hosts() -> list[HostGroup]:
    return [HostGroup(ThreadDist(group), None) for group in Ranks(SIZE).groups]


def test_objects_of_every_size_in_the_order_of_ranks() -> None:
    groups = hosts()
    values = [None, "x" * 100_000, {"of": 2}]

    def work(rank: int) -> list[list[Any]]:
        channel = groups[rank].channel(Channel.WORLD)
        return [channel.gather_objects(values[rank]), channel.gather_objects(rank)]

    assert in_threads(work, SIZE) == [[values, [0, 1, 2]]] * SIZE


def test_some_ranks_and_several_channels() -> None:
    groups = hosts()

    def work(rank: int) -> tuple[Any, Any]:
        some = groups[rank].channel(Channel.DATA_PARALLEL, [2, 0]) if rank != 1 else None
        everybody = groups[rank].channel(Channel.BARRIER)
        return some and (some.rank, some.gather_objects(rank)), everybody.gather_objects(rank)

    assert in_threads(work, SIZE) == [((1, [2, 0]), [0, 1, 2]), (None, [0, 1, 2]), ((0, [2, 0]), [0, 1, 2])]


def test_collectives_of_another_thread_are_not_disturbed() -> None:
    """A checkpoint is saved in the background: its collectives and these messages come in any order."""
    groups, num = hosts(), 20

    def work(rank: int) -> tuple[list[float], list[int]]:
        sums = [torch.full((2,), float(number + rank)) for number in range(num)]
        saver = threading.Thread(target=lambda: [groups[rank].dist.sum(tensor) for tensor in sums])
        saver.start()
        channel = groups[rank].channel(Channel.WORLD)
        numbers = [sum(channel.gather_objects(number * rank)) for number in range(num)]
        saver.join()
        return [float(tensor[0]) for tensor in sums], numbers

    expected = [3.0 * number + 3 for number in range(num)], [3 * number for number in range(num)]
    assert in_threads(work, SIZE) == [expected] * SIZE


@pytest.mark.slow
def test_messages_of_two_channels_are_never_taken_for_one_another() -> None:
    """The first rank receives them in another order than the others sent them."""
    groups = hosts()

    def work(rank: int) -> list[list[str]]:
        channels = [groups[rank].channel(tag) for tag in (Channel.WORLD, Channel.BARRIER)]
        if rank == 0:
            time.sleep(0.4)  # both messages of each of the others are on their way
            return [channel.gather_objects(f"{number}") for number, channel in reversed(list(enumerate(channels)))][
                ::-1
            ]
        with ThreadPoolExecutor() as pool:
            found = []
            for number, channel in enumerate(channels):
                found.append(pool.submit(channel.gather_objects, f"{number}"))
                time.sleep(0.1)
            return [future.result() for future in found]

    assert in_threads(work, SIZE) == [[["0"] * SIZE, ["1"] * SIZE]] * SIZE


@pytest.mark.slow
def test_who_does_not_come_is_an_error_within_the_limit() -> None:
    groups = hosts()

    def work(rank: int) -> None:
        if rank != 1:
            with pytest.raises(RuntimeError):
                groups[rank].channel(Channel.WORLD, limit=timedelta(seconds=0.2)).gather_objects(rank)

    in_threads(work, SIZE)


@pytest.mark.slow
def test_who_has_ended_is_noticed_at_once_and_others_are_still_heard() -> None:
    groups = hosts()
    channels = [groups[rank].channel(Channel.BARRIER, [0, 2]) for rank in (0, 2)]
    watching = groups[0].channel(Channel.BARRIER)
    assert not any(watching.is_gone(rank) for rank in (1, 2))
    del groups[1]  # closes its connections, as the end of a process does
    until = time.monotonic() + 10
    while not watching.is_gone(1):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not watching.is_gone(2)
    assert in_threads(lambda rank: channels[rank].gather_objects(rank), 2) == [[0, 1]] * 2


def lonely(backend: str, new_group: Callable[..., Any]) -> Any:
    """What `make_host_group` calls of `torch.distributed`, on one rank."""
    return SimpleNamespace(
        get_rank=lambda: 0,
        get_world_size=lambda: 1,
        get_backend=lambda: backend,
        new_group=new_group,
        distributed_c10d=SimpleNamespace(_set_pg_timeout=lambda timeout, group: None),
    )


@pytest.mark.parametrize(("backend", "expected"), [("nccl", "eth1"), ("gloo", None)])
def test_the_group_is_made_on_the_way_to_the_first_node(
    backend: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run over gloo has found its own; and connections are allowed before they are made."""
    done: list[Any] = []
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(host_group, "interface_for_gloo", lambda ranks: "eth1")
    monkeypatch.setattr(host_group, "allow_connections", lambda size, warn, num_groups: done.append((size, num_groups)))
    make_host_group(
        lonely(backend, lambda backend, timeout, **_: done.append((backend, os.environ.get("GLOO_SOCKET_IFNAME")))),
        OneRank(),
        pytest.fail,
    )
    assert done == [(1, 2), ("gloo", expected)]


def test_ranks_may_wait_for_longer_than_nccl_lets_them() -> None:
    """Ten minutes; the limit of the group is that of collectives, which a save has."""
    assert timedelta(hours=1) <= LIMIT
    limits: list[timedelta] = []
    alone = lonely("nccl", lambda backend, timeout, **_: limits.append(timeout))
    alone.distributed_c10d._set_pg_timeout = lambda timeout, group: limits.append(timeout)
    host = make_host_group(alone, OneRank(), pytest.fail)
    assert limits[0] < timedelta(minutes=10), "ranks that cannot be reached are told soon"
    assert limits[1:] == [LIMIT]
    assert run_on_rank_0(host.channel(Channel.WORLD), lambda: 7) == 7


def test_torch_has_what_is_called() -> None:
    assert callable(dist.isend)
    assert callable(dist.irecv)
