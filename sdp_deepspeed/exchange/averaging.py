"""Masked averages of gradients, as the optimizer asks for them; what all stages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from sdp_deepspeed.exchange.exchange import Exchange
from sdp_deepspeed.exchange.gradient_norm import sum_of_squares
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.layout.segments import Bucket
from sdp_deepspeed.tensor_parallel.group import TensorParallelGroup

Item = TypeVar("Item")
Running = TypeVar("Running")


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


@dataclass(frozen=True)
class AveragingOptions:
    """What does not depend on the stage.

    Args:
        group_sizes: elements that this rank owns in each optimizer param group.
        max_in_flight: buckets whose exchange may run while something else is done; 0 waits for each.
        tp_group: the tensor-parallel group, None without one.
    """

    group_sizes: Sequence[int]
    max_in_flight: int = 0
    tp_group: TensorParallelGroup | None = None


def run_pipelined(
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
    """

    def __init__(self, exchange: Exchange, gradients: Gradients, options: AveragingOptions) -> None:
        self._exchange = exchange
        self._gradients = gradients
        self._group_sizes = list(options.group_sizes)
        self._max_in_flight = options.max_in_flight
        self._tp_group = options.tp_group
        self._device = exchange.device
        self._last_use = exchange.last_uses()

    def install(self) -> None:  # noqa: B027 (nothing to do where the exchange runs in `collect`)
        """Put hooks where backward passes must tell of their gradients; called once, before the first of them."""

    @abstractmethod
    def collect(self) -> Averages:
        """Averages of all backward passes since the last call; a collective."""

    def begin_backward(self) -> None:  # noqa: B027
        """Every rank calls it before each backward pass."""

    def fail_backward(self) -> None:  # noqa: B027
        """A rank calls it when a backward pass ended with an error."""

    def end_backward(self) -> None:  # noqa: B027
        """Every rank calls it after each backward pass."""

    def tensors(self) -> list[torch.Tensor]:
        """What is kept between `end_backward` and `collect` besides local gradients, for measurements."""
        return []

    def drop(self) -> None:  # noqa: B027
        """Forget what was averaged so far."""

    def _free_packed(self, bucket: Bucket) -> None:
        """Gradients of which no later bucket has a part; this one's were packed, this rank's own shard with them."""
        for name in self._last_use[bucket.index]:
            self._gradients.free(name)

    def _squares(self, bucket: Bucket, averages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of a bucket's owned averages, what this rank counts in the norm."""
        fragments = [fragments for _, fragments in self._exchange.owned(bucket)]
        return sum_of_squares(averages, fragments, tp_group=self._tp_group, device=self._device)


def unscale(gradients: list[torch.Tensor], divisor: float) -> None:
    """In place, and in fp32 if they are: half precision could not hold what a loss scale is divided out of."""
    if gradients and divisor != 1.0:
        torch._foreach_div_(gradients, divisor)
