"""Masked averages of gradients: what the optimizer asks for, and how stages 0 and 1 make them in its step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.exchange import Exchange, Reduction, write
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.layout.segments import Bucket
from sdp_deepspeed.tensor_parallel.group import ModelParallel

Item = TypeVar("Item")
Running = TypeVar("Running")

# Elements of which a CPU sums squares in fp32, one after the other: of 50 million the sum would be off by 1%.
CPU_STRETCH = 2**14


@dataclass(frozen=True)
class Averages:
    """What one step gets.

    Args:
        flats: owned averages, for each optimizer param group fp32 stretches in the order of its fragments: one flat
            gradient, or several of whole fragments; None if they lie in the local gradients of all holders instead
            (stage 0).
        squares: sum of squares of what this rank counts of the dense gradient (float64, []).
    """

    flats: list[list[torch.Tensor]] | None
    squares: torch.Tensor


def pipelined(
    items: Iterable[Item],
    start: Callable[[Item], Running],
    finish: Callable[[Running], None],
    *,
    max_in_flight: int,
) -> None:
    """Finish what was started in the same order, while at most `max_in_flight` others run."""
    running: deque[Running] = deque()
    for item in items:
        running.append(start(item))
        while len(running) > max_in_flight:
            finish(running.popleft())
    while running:
        finish(running.popleft())


class Averaging(ABC):
    """Averages over holders, for one optimizer; every data-parallel rank calls the same methods.

    Args:
        exchange: whose buckets are reduced.
        gradients: local ones.
        group_sizes: elements that this rank owns in each optimizer param group.
        max_in_flight: buckets whose exchange may run while something else is done; 0 waits for each.
        model_parallel: the tensor-parallel group, None without one.
    """

    def __init__(
        self,
        exchange: Exchange,
        gradients: Gradients,
        *,
        group_sizes: Sequence[int],
        max_in_flight: int = 0,
        model_parallel: ModelParallel | None = None,
    ) -> None:
        self._exchange = exchange
        self._gradients = gradients
        self._group_sizes = list(group_sizes)
        self._max_in_flight = max_in_flight
        self._model_parallel = model_parallel
        self._device = exchange.device
        self._last_use = exchange.last_uses()

    @abstractmethod
    def take(self) -> Averages:
        """Averages of all backward passes since the last call; a collective."""

    def end_backward(self) -> None:  # noqa: B027 (nothing to do where the exchange runs in `take`)
        """Every rank calls it after each backward pass."""

    def tensors(self) -> list[torch.Tensor]:
        """What is kept between `end_backward` and `take` besides local gradients, for measurements."""
        return []

    def drop(self) -> None:  # noqa: B027
        """Forget what was averaged so far."""

    def _slots(self, flats: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each bucket the stretches of `flats` for what this rank owns of it."""
        position = [0] * len(flats)
        slots: list[list[torch.Tensor]] = []
        for bucket in self._exchange.buckets:
            slots.append([])
            for segment, fragments in self._exchange.owned(bucket):
                length = sum(fragment.stop - fragment.start for fragment in fragments)
                slots[-1].append(flats[segment.group].narrow(0, position[segment.group], length))
                position[segment.group] += length
        return slots

    def _free_packed(self, bucket: Bucket) -> None:
        """Gradients of which no later bucket has a part; this one's were packed, this rank's own shard with them."""
        for name in self._last_use[bucket.index]:
            self._gradients.free(name)

    def _squares(self, bucket: Bucket, averages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of a bucket's owned averages; what tensor-parallel ranks have in common is counted on one of them."""
        if self._model_parallel is not None:
            averages = [
                part
                for (_, fragments), average in zip(self._exchange.owned(bucket), averages, strict=True)
                for fragment, part in zip(fragments, average.split([f.stop - f.start for f in fragments]), strict=True)
                if self._model_parallel.counts(fragment.piece.parameter)
            ]
        if self._device.type == "cpu":
            averages = [part for average in averages for part in average.split(CPU_STRETCH)]
        if not averages:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        norms = torch._foreach_norm(list(averages), dtype=torch.float32)  # fp16 could not hold them, bf16 would round
        return torch.stack(norms).double().square().sum()


class StepAveraging(Averaging):
    """Stages 0 and 1: everything is exchanged in `take`. Any number of backward passes may come before it.

    Args:
        keeps_flats: stage 1. At stage 0 the owners send averages back to all holders.
        needs_one_flat: for each optimizer param group whether its averages must be one tensor (a master's gradient).
            Others grow bucket by bucket while local gradients go, so that never both are there as a whole.
        options: as `Averaging`.
    """

    def __init__(
        self,
        exchange: Exchange,
        gradients: Gradients,
        *,
        group_sizes: Sequence[int],
        keeps_flats: bool = True,
        needs_one_flat: Sequence[bool] = (),
        **options: Any,
    ) -> None:
        super().__init__(exchange, gradients, group_sizes=group_sizes, **options)
        self._keeps_flats = keeps_flats
        self._needs_one_flat = list(needs_one_flat) or [True] * len(group_sizes)

    @torch.no_grad()
    def take(self) -> Averages:
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        flats = [
            [torch.empty(size, device=self._device)] if whole else []
            for size, whole in zip(self._group_sizes, self._needs_one_flat if self._keeps_flats else (), strict=False)
        ]
        position = [0] * len(flats)

        def slots(bucket: Bucket) -> list[torch.Tensor]:
            found = []
            for segment, fragments in self._exchange.owned(bucket):
                group, length = segment.group, sum(fragment.stop - fragment.start for fragment in fragments)
                if self._needs_one_flat[group]:
                    found.append(flats[group][0].narrow(0, position[group], length))
                    position[group] += length
                else:
                    flats[group].append(torch.empty(length, device=self._device))
                    found.append(flats[group][-1])
            return found

        def start(bucket: Bucket) -> Reduction:
            if not self._keeps_flats:
                return self._exchange.start_reduce(bucket, self._gradients.view)
            reduction = self._exchange.start_reduce(bucket, self._gradients.view, slots(bucket))
            self._free_packed(bucket)
            return reduction

        def finish(reduction: Reduction) -> None:
            self._exchange.finish_reduce(reduction)
            squares.add_(self._squares(reduction.bucket, reduction.averages))
            if not self._keeps_flats:
                self._send_back(reduction)

        pipelined(self._exchange.buckets, start, finish, max_in_flight=self._max_in_flight)
        return Averages(flats if self._keeps_flats else None, squares)

    def _send_back(self, reduction: Reduction) -> None:
        bucket = reduction.bucket
        for name in self._exchange.held_names(bucket):
            self._gradients.make(name)
        for (_, fragments), average in zip(self._exchange.owned(bucket), reduction.averages, strict=True):
            sizes = [fragment.stop - fragment.start for fragment in fragments]
            write(self._gradients.view, fragments, average.split(sizes))
        self._exchange.distribute(bucket, self._gradients.view)


def divide(gradients: list[torch.Tensor], divisor: float) -> None:
    """In place, and in fp32 if they are: half precision could not hold what a loss scale is divided out of."""
    if gradients and divisor != 1.0:
        torch._foreach_div_(gradients, divisor)


def global_norm(squares: torch.Tensor, communicator: Communicator, model_parallel: ModelParallel | None) -> float:
    """Norm of the dense gradient from what each rank counts; a collective of both groups."""
    communicator.sum(squares)
    if model_parallel is not None:
        model_parallel.communicator.sum(squares)
    return float(squares.sqrt())
