"""All-to-alls over gloo in which all ranks send at the same time.

Gloo's own posts each send before the receive from the same peer, on one connection. A rank that comes second finds its
peer ready and writes all of its data at once; that it is ready itself, it says behind them. So the first rank waits for
the last byte before it sends its own, and a link carries one direction after the other: twice the time. (alltoallv.cc
and transport/tcp/pair.cc of gloo; benchmarks/link_rates.py measures it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_TAG = 0x5D9  # of messages between two ranks; the same for all, which arrive in the order in which they were sent


@dataclass(frozen=True)
class _Messages:
    """An all-to-all that runs.

    Args:
        end: a collective without data. Between two ranks it goes behind the messages, so that its end is theirs; it
            can be waited for in slices, which messages cannot: gloo closes connections where time runs out.
        messages: sent and received; with several interfaces they have connections of their own, and may come later.
    """

    end: Any
    messages: Sequence[Any]

    def wait(self, *limit: Any) -> None:
        self.end.wait(*limit)
        for message in self.messages:
            message.wait()

    def is_completed(self) -> bool:
        return bool(self.end.is_completed())


class ReceiveFirst:
    """`torch.distributed` or `deepspeed.comm`, with another `all_to_all_single` for one group of gloo's.

    Args:
        dist: whose functions are taken.
        ranks: of the group, by their numbers among all.
    """

    def __init__(self, dist: Any, ranks: Sequence[int]) -> None:
        self._dist = dist
        self._ranks = tuple(ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)

    def all_to_all_single(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
        *,
        group: Any,
        async_op: bool,
    ) -> Any:
        """Start it; every rank of the group calls it. What is not in host memory goes gloo's own way."""
        if sent.device.type != "cpu" or not async_op:
            return self._dist.all_to_all_single(
                received, sent, received_splits, sent_splits, group=group, async_op=async_op
            )
        size, own = len(self._ranks), self._dist.get_rank(group)
        arriving, leaving = received.split(list(received_splits)), sent.split(list(sent_splits))
        if received_splits[own]:
            arriving[own].copy_(leaving[own])
        peers = [(own + step) % size for step in range(1, size)]  # so that not all send to the same one
        # By position: the two hosts name their arguments differently.
        messages = [
            self._dist.irecv(arriving[peer], self._ranks[peer], group, _TAG)
            for peer in reversed(peers)
            if received_splits[peer]
        ]
        messages += [
            self._dist.isend(leaving[peer], self._ranks[peer], group, _TAG) for peer in peers if sent_splits[peer]
        ]
        none = [0] * size
        empty = sent.new_empty(0), sent.new_empty(0)
        end = self._dist.all_to_all_single(*empty, none, none, group=group, async_op=True)
        return _Messages(end, messages)
