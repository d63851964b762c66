"""ZeRO stage 2: gradients leave during backward, bucket by bucket, and only owned shards are kept (DESIGN.md section 4).

A round sends every bucket once, in the order of the buckets, which is the same on all ranks; each backward pass of the
engine is a round. A bucket leaves as soon as all its gradients are there and all buckets before it have left. What comes
too late for its bucket stays in `param.grad` for the next round, since averages add up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .communicator import Communicator
from .exchange import Exchange, Reduction
from .gradients import Gradients
from .segments import Bucket


class BackwardReduction:
    """Every data-parallel rank runs the same number of rounds.

    Args:
        exchange: whose buckets are reduced.
        gradients: local ones.
        parameters: the module's parameters by dense name.
        group_sizes: elements that this rank owns in each optimizer param group.
        dtype: in which owned averages are summed over the micro-steps.
        max_in_flight: buckets whose exchange may run while backward goes on; 0 waits for each.
    """

    def __init__(
        self,
        exchange: Exchange,
        gradients: Gradients,
        communicator: Communicator,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        group_sizes: Sequence[int],
        dtype: torch.dtype,
        max_in_flight: int = 0,
    ) -> None:
        self._exchange = exchange
        self._gradients = gradients
        self._communicator = communicator
        self._group_sizes = list(group_sizes)
        self._dtype = dtype
        self._max_in_flight = max_in_flight
        self._device = next(iter(parameters.values())).device
        trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self._expected = [exchange.held_names(bucket) & trained for bucket in exchange.buckets]
        self._last_use = exchange.last_uses()
        self._buckets_of: dict[str, list[int]] = {}
        for index, names in enumerate(self._expected):
            for name in names:
                self._buckets_of.setdefault(name, []).append(index)
        self._flats: list[torch.Tensor] | None = None
        self._targets: list[list[torch.Tensor]] = []
        self._in_flight: deque[Reduction] = deque()
        self._next = 0  # first bucket that has not left in this round
        self._ready: set[str] = set()
        for name in self._buckets_of:
            parameters[name].register_post_accumulate_grad_hook(lambda _, name=name: self._arrived(name))

    def _arrived(self, name: str) -> None:
        """A parameter's gradient is complete, or so it seems: another checkpointed segment may use it too."""
        buckets = self._buckets_of[name]
        if name in self._ready and buckets[0] < self._next <= buckets[-1]:
            raise RuntimeError(
                f"{name} got a second gradient in one backward pass when a part of the first was on its way: it is used "
                "in several checkpointed segments, which stage 2 does not support; use stage 1"
            )
        self._ready.add(name)
        while self._next < len(self._expected) and self._ready >= self._expected[self._next]:
            self._send(self._exchange.buckets[self._next])

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        self._next += 1
        self._in_flight.append(self._exchange.start_reduce(bucket, self._gradients.view))
        while len(self._in_flight) > self._max_in_flight:
            self._receive(self._in_flight.popleft())

    def _receive(self, reduction: Reduction) -> None:
        bucket = reduction.bucket
        first = self._flats is None
        if first:
            self._allocate()
        targets = self._targets[bucket.index]
        averages = [torch.empty_like(target, dtype=torch.float32) for target in targets]
        self._exchange.finish_reduce(reduction, self._gradients.view, averages)
        if averages:
            torch._foreach_add_(targets, averages)
        for name in self._last_use[bucket.index]:
            self._gradients.free(name)

    def _allocate(self) -> None:
        self._flats = [torch.zeros(size, dtype=self._dtype, device=self._device) for size in self._group_sizes]
        position = [0] * len(self._flats)
        self._targets = []
        for bucket in self._exchange.buckets:
            self._targets.append([])
            for segment, fragments in self._exchange.owned(bucket):
                length = sum(fragment.stop - fragment.start for fragment in fragments)
                self._targets[-1].append(self._flats[segment.group].narrow(0, position[segment.group], length))
                position[segment.group] += length

    @torch.no_grad()
    def end_round(self) -> None:
        """Send what has not left; every rank calls it at the end of a backward pass."""
        while self._next < len(self._exchange.buckets):
            self._send(self._exchange.buckets[self._next])
        while self._in_flight:
            self._receive(self._in_flight.popleft())
        self._next = 0
        self._ready.clear()

    def take(self) -> list[torch.Tensor]:
        """Owned averages of all rounds since the last call, one flat fp32 tensor per param group; every rank calls it."""
        while self._anything_left():
            self.end_round()
        if self._flats is None:
            self._allocate()
        assert self._flats is not None
        flats = [flat.float() for flat in self._flats]
        self._flats, self._targets = None, []
        return flats

    def _anything_left(self) -> bool:
        left = self._next > 0 or bool(self._gradients.tensors())
        return bool(self._communicator.sum(torch.tensor(float(left), device=self._device)))

    def tensors(self) -> list[torch.Tensor]:
        """Sums that exist now, for measurements."""
        return list(self._flats or ())

    def drop(self) -> None:
        """Forget the sums of this step."""
        self._flats, self._targets = None, []
