"""The collectives of a bucket: from the owners of its shards to whoever needs them.

A collective in which no rank has anything to send is left out, on all ranks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.routes import Half, Route, routes_back
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import Views
from sdp_deepspeed.layout.nodes import Nodes, Receivers

Steps = Generator[None, None, None]
"""Where it yields a collective runs, and something else may be done; what comes after may be on another stream."""


class Exchange:
    """Over one process group; every rank calls the same methods in the same bucket order.

    Args:
        buckets: of all ranks' segments, the same on every rank.
        dp_group: the data-parallel group.
        nodes: of its ranks.
        device: of the tensors.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dp_group: Communicator,
        nodes: Nodes,
        *,
        device: torch.device,
    ) -> None:
        self.buckets = tuple(buckets)
        self.device = device
        self._dp_group = dp_group
        self._nodes = nodes
        self._routes: dict[tuple[int, Receivers], tuple[Route, Route]] = {}

    def distribute(self, bucket: Bucket, tensors: Views, *, receivers: Receivers = "holders") -> Steps:
        """Send the owners' shards of `tensors` to the receivers, who write them into theirs.

        Args:
            tensors: this rank's own shards are read when it begins, what it passes on to neighbors when that has come;
                what it receives is overwritten.
        """
        for route in self._routes_of(bucket, receivers):
            if route.is_needed:
                leaving = self._packed(route.sent, tensors, bucket.segments[0].dtype)
                arrived = yield from self._travel(leaving, route.sent, route.received)
                route.received.transfer.scatter([arrived], tensors)

    def _travel(self, leaving: torch.Tensor, sent: Half, received: Half) -> Generator[None, None, torch.Tensor]:
        """What arrives."""
        arriving = torch.empty(received.num_elements, dtype=leaving.dtype, device=self.device)
        work = self._dp_group.all_to_all(arriving, leaving, received.splits, sent.splits)
        yield
        work.wait()
        return arriving

    def _packed(self, half: Half, tensors: Views, dtype: torch.dtype) -> torch.Tensor:
        """What is sent, read from `tensors`; what goes to several ranks is read once."""
        buffer = torch.empty(half.num_elements, dtype=dtype, device=self.device)
        half.transfer.gather(tensors, [buffer])
        half.repeats.copy([buffer], [buffer])
        return buffer

    def _routes_of(self, bucket: Bucket, receivers: Receivers) -> tuple[Route, Route]:
        key = (bucket.index, receivers)
        if key not in self._routes:
            self._routes[key] = routes_back(bucket, self._dp_group.rank, self._nodes, receivers)
        return self._routes[key]


def in_rounds(exchange: Exchange, buckets: Sequence[Bucket], views: Views, num_rounds: int) -> Steps:
    """Each bucket from its owners to all others, `num_rounds` under way at the same time. Where it yields, once, the
    first run; what comes is written to `views` only after that."""
    running: deque[Steps] = deque()
    coming = iter(buckets)

    def start(number: int) -> None:
        for bucket in itertools.islice(coming, number):
            running.append(exchange.distribute(bucket, views, receivers="others"))
            next(running[-1], None)

    start(num_rounds)
    yield
    while running:
        deque(running.popleft(), maxlen=0)
        start(1)
