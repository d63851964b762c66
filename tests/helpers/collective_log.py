"""Which collectives ranks issue in which order, and whether that can end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from sdp_deepspeed.parallel import collectives

Issued = tuple[tuple[int, ...], str, int]
"""Ranks of the group, what was called, and how many elements it is about."""


@contextmanager
def collectives_of_fsdp(delay: Callable[[], object] = lambda: None) -> Iterator[list[Issued]]:
    """What this rank issues inside, in order: all-gathers and reduce-scatters of FSDP2.

    Args:
        delay: called before each.
    """
    with _collectives_of(dist, "all_gather_single", "reduce_scatter_single", delay=delay) as log:
        yield log


@contextmanager
def collectives_of_engines(delay: Callable[[], object]) -> Iterator[list[Issued]]:
    """What this rank issues inside, in order, for engines: collectives of holders, and messages in their place.

    Args:
        delay: called before each.
    """
    exchange = collectives.exchange

    def logged_exchange(messages: Sequence[collectives.Messages]) -> None:
        delay()
        for _, leaving, group in messages:
            log.append((tuple(dist.get_process_group_ranks(group.process_group)), "exchange", leaving[0].numel()))
        exchange(messages)

    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "reduce", "broadcast")
    with (
        _collectives_of(deepspeed.comm, *names, delay=delay) as log,
        mock.patch.object(collectives, "exchange", logged_exchange),
    ):
        yield log


@contextmanager
def _collectives_of(module: Any, *names: str, delay: Callable[[], object]) -> Iterator[list[Issued]]:
    log: list[Issued] = []

    def logged(name: str) -> Any:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            delay()
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            ranks = tuple(dist.get_process_group_ranks(kwargs["group"]))
            log.append((ranks, name, max(tensor.numel() for tensor in tensors)))
            return original(*args, **kwargs)

        return mock.patch.object(module, name, call)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(logged(name))
        yield log


def check_order(logs: Sequence[Sequence[Issued]]) -> int:
    """Each group's collectives come in one order on all of its ranks; and all ranks' collectives together have an
    order that each rank keeps, so that even ranks that wait for each one to end come to an end.

    Returns:
        How many collectives there were.
    """
    of_group: dict[tuple[int, ...], dict[int, list[tuple[str, int]]]] = {}
    numbered: list[list[tuple[tuple[int, ...], int]]] = []
    for rank, log in enumerate(logs):
        numbered.append([])
        for ranks, name, size in log:
            own = of_group.setdefault(ranks, {}).setdefault(rank, [])
            numbered[-1].append((ranks, len(own)))
            own.append((name, size))
    for ranks, calls in of_group.items():
        assert calls.keys() == {*ranks}, ranks
        first, *others = calls.values()
        assert all(other == first for other in others), (ranks, calls)
    done, positions = 0, [0] * len(logs)
    while True:
        waiting = {rank: log[positions[rank]] for rank, log in enumerate(numbered) if positions[rank] < len(log)}
        ready = [step for step in {*waiting.values()} if all(waiting.get(rank) == step for rank in step[0])]
        if not ready:
            assert not waiting, f"ranks wait for each other: {waiting}"
            return done
        for ranks, _ in ready:
            done += 1
            for rank in ranks:
                positions[rank] += 1
