"""Small things of all ranks by way of their hosts, over gloo, whatever the run's own backend is.

Ranks wait here for one that reads or writes files, or tokenizes: NCCL would end their processes after ten minutes. One
process group serves an engine, as each has a connection to every other rank. Its collectives belong to whoever saves,
maybe in a thread; everything else goes through channels, whose tagged messages cannot pair with those.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.descriptors import allow_connections
from sdp_deepspeed.distributed.gloo_threads import settle_at_exit
from sdp_deepspeed.distributed.interfaces import gloo_uses, interface_for_gloo

_CONNECTING = timedelta(minutes=5)  # of waiting for a rank that cannot be reached
DESCRIPTION = "sdp_deepspeed_host"  # of the group, as PyTorch's own logs name it
LIMIT = timedelta(hours=2)  # of waiting for a rank that lives; one whose process ends is noticed at once


class Channel(IntEnum):
    """Tags; ranks may be in several channels at a time."""

    WORLD = 1
    DATA_PARALLEL = 2
    TENSOR_PARALLEL = 3
    BARRIER = 4
    NOTHING = 5  # nobody sends in it


@dataclass(frozen=True)
class HostGroup:
    """All ranks, over gloo.

    Args:
        dist: `torch.distributed`.
        group: with `LIMIT` for its collectives.
    """

    dist: Any
    group: Any

    def channel(self, tag: Channel, ranks: Sequence[int] | None = None, *, limit: timedelta = LIMIT) -> HostChannel:
        """For small objects of some ranks.

        Args:
            ranks: this one among them; None for all.
            limit: of waiting.
        """
        members = range(self.dist.get_world_size()) if ranks is None else ranks
        return HostChannel(self, tag, tuple(members), limit)


class HostChannel:
    """A `Gatherer`: through the first of the ranks, which gets from all and gives to all. Each calls the same methods.

    Args:
        ranks: of the default group.
        limit: of waiting for a message, seconds for each.
    """

    def __init__(self, host: HostGroup, tag: Channel, ranks: tuple[int, ...], limit: timedelta) -> None:
        self._host, self._tag, self._ranks, self._limit = host, int(tag), ranks, limit
        self.rank, self.size = ranks.index(host.dist.get_rank()), len(ranks)

    def gather_objects(self, value: object) -> list[Any]:
        """One small picklable object of every rank, in their order.

        Raises:
            RuntimeError: gloo's, where a rank is gone or did not come within the limit. Nothing can be sent after it.
        """
        own = pickle.dumps(value)
        if self.size == 1:
            texts = [own]
        elif self.rank:
            self._send([own], to=[0])
            (texts,) = self._receive(self.size, of=[0])
        else:
            others = range(1, self.size)
            texts = [own, *(text for (text,) in self._receive(1, of=others))]
            self._send(texts, to=others)
        return [pickle.loads(text) for text in texts]

    def is_gone(self, rank: int) -> bool:
        """Whether the process of one of the others has ended; returns at once.

        Gloo notices it by the connection, and says so to whoever would receive from it: here what nobody ever sends.
        """
        try:
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            self._host.dist.irecv(nothing, self._ranks[rank], self._host.group, int(Channel.NOTHING))
        except RuntimeError:
            return True
        return False

    def _send(self, texts: Sequence[bytes], *, to: Sequence[int]) -> None:
        """The same to each: lengths, then everything in a row."""
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64, device="cpu")
        everything = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        self._wait([self._start("isend", tensor, rank) for rank in to for tensor in (lengths, everything)])

    def _receive(self, count: int, *, of: Sequence[int]) -> list[list[bytes]]:
        """From each so many texts."""
        lengths = [torch.empty(count, dtype=torch.int64, device="cpu") for _ in of]
        self._wait([self._start("irecv", tensor, rank) for tensor, rank in zip(lengths, of, strict=True)])
        everything = [torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu") for sizes in lengths]
        self._wait([self._start("irecv", tensor, rank) for tensor, rank in zip(everything, of, strict=True)])
        return [
            _cut(tensor.numpy().tobytes(), sizes.tolist()) for tensor, sizes in zip(everything, lengths, strict=True)
        ]

    def _start(self, what: str, tensor: torch.Tensor, rank: int) -> Any:
        start: Callable[..., Any] = getattr(self._host.dist, what)
        return start(tensor, self._ranks[rank], self._host.group, self._tag)

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            work.wait(self._limit)


def _cut(everything: bytes, lengths: Sequence[int]) -> list[bytes]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return [everything[start:end] for start, end in pairwise(ends)]


def make_host_group(dist: Any, ranks: Gatherer, warn: Callable[[str], None]) -> HostGroup:
    """Every rank calls it.

    Args:
        dist: `torch.distributed`.
        ranks: all, met without gloo.
        warn: told what stands in the way of so many connections.

    Raises:
        RuntimeError: hosts cannot tell how to reach one another (on all ranks), or cannot, and what to set.
    """
    allow_connections(dist.get_world_size(), warn, num_groups=2)  # and the signs of life, over the store
    settle_at_exit()
    # The run's own group over gloo has found its way.
    name = None if dist.get_backend() == "gloo" else interface_for_gloo(ranks)
    with gloo_uses(name):  # not agreed on: where one rank cannot connect, others still try
        group = dist.new_group(backend="gloo", timeout=_CONNECTING, group_desc=DESCRIPTION)
    dist.distributed_c10d._set_pg_timeout(LIMIT, group)
    return HostGroup(dist, group)
