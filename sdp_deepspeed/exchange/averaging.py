"""Masked averages of gradients, as the optimizer asks for them; what all stages have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.exchange import Exchange, Steps
from sdp_deepspeed.exchange.gradient_norm import sum_of_squares, summed
from sdp_deepspeed.exchange.gradients import Gradients
from sdp_deepspeed.exchange.streams import NoStreams
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import num_elements
from sdp_deepspeed.tensor_parallel.group import TensorParallelGroup


@dataclass(frozen=True)
class Averages:
    """What one step gets.

    Args:
        flats: owned averages, for each optimizer param group fp32 stretches in the order of its fragments: one flat
            gradient, or several of whole fragments; None if they lie in the local gradients of all holders instead
            (stage 0).
        squares: sum of squares of the dense gradient; None where nobody needs its norm.
    """

    flats: list[list[torch.Tensor]] | None
    squares: float | None


@dataclass(frozen=True)
class AveragingOptions:
    """What does not depend on the stage.

    Args:
        dp_group: the data-parallel group.
        group_sizes: elements that this rank owns in each optimizer param group.
        needs_norm: whether anybody asks for the norm.
        max_in_flight: buckets of which a collective may run while something else is done; 0 waits for each.
        tp_group: the tensor-parallel group, None without one.
    """

    dp_group: Communicator
    group_sizes: Sequence[int]
    needs_norm: bool = True
    max_in_flight: int = 0
    tp_group: TensorParallelGroup | None = None


_DONE = object()


class Pipeline:
    """Exchanges that run at the same time: of each of their collectives so many, while others are packed or unpacked.

    All move on in the order in which they began, the same on all ranks. Each is packed on the caller's stream and goes
    on beside it; a caller's stream that is too far ahead waits where buffers are taken again.

    Args:
        max_in_flight: how many; with 0 each is done when `add` returns.
        streams: one is the caller's.
    """

    def __init__(self, max_in_flight: int, streams: NoStreams) -> None:
        self._max_in_flight = max_in_flight
        self._streams = streams
        self._running: list[deque[Steps]] = []  # by the collective that they are in

    def add(self, steps: Steps) -> None:
        """Begin another, and go on with what has waited longest."""
        with self._streams.after_noted():
            is_done = next(steps, _DONE) is _DONE
        if not is_done:
            with self._streams.beside():
                self._put(steps, 0)

    def finish(self) -> None:
        """Go on with all that run, to their end. On a GPU they may still run; `join` waits for that."""
        if any(self._running):
            with self._streams.beside():
                for number, running in enumerate(self._running):
                    while running:
                        self._go_on(running.popleft(), number + 1)
        self._streams.forget()

    def join(self) -> None:
        """Finish; what the caller does next finds the results."""
        self.finish()
        self._streams.join()

    def _go_on(self, steps: Steps, number: int) -> None:
        if next(steps, _DONE) is not _DONE:
            self._put(steps, number)

    def _put(self, steps: Steps, number: int) -> None:
        """Its collective of this number runs."""
        if number == len(self._running):
            self._running.append(deque())
        self._running[number].append(steps)
        if len(self._running[number]) > self._max_in_flight:
            self._go_on(self._running[number].popleft(), number + 1)


class Averaging(ABC):
    """Averages over holders, for one optimizer; every data-parallel rank calls the same methods.

    Args:
        exchange: whose buckets are reduced.
        gradients: local ones.
    """

    def __init__(self, exchange: Exchange, gradients: Gradients, options: AveragingOptions) -> None:
        self._exchange = exchange
        self._gradients = gradients
        self._dp_group = options.dp_group
        self._tp_group = options.tp_group
        self._group_sizes = list(options.group_sizes)
        self._needs_norm = options.needs_norm
        self._device = exchange.device
        self._last_use = exchange.last_uses()

    def install(self) -> None:  # noqa: B027 (nothing to do where the exchange runs in `collect`)
        """Put hooks where backward passes must tell of their gradients; called once, before the first of them."""

    def uninstall(self) -> None:  # noqa: B027
        """Inverse of `install`; between steps."""

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

    def _borrowed(self, bucket: Bucket) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A buffer for averages that do not outlive the bucket's exchange, and its parts."""
        sizes = [num_elements(fragments) for _, fragments in self._exchange.owned(bucket)]
        flat = self._exchange.buffers.take(sum(sizes), torch.float32)
        return flat, list(flat.split(sizes))

    def _no_squares(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def _summed(self, squares: torch.Tensor, is_left: bool = False, *facts: float) -> tuple[float, bool, list[float]]:
        return summed(squares, is_left, *facts, dp_group=self._dp_group, tp_group=self._tp_group)


def unscale(gradients: list[torch.Tensor], divisor: float) -> None:
    """In place, and in fp32 if they are: half precision could not hold what a loss scale is divided out of."""
    if gradients and divisor != 1.0:
        torch._foreach_div_(gradients, divisor)
