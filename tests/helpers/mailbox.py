"""Threads that stand for ranks and exchange through memory, in the least favorable way that a backend may choose.

What was sent arrives in `wait` and not before: until then the receiver's buffer holds NaN, and the sender's is looked
at only there. So a wait that is missing, or a buffer that is touched too early, changes results on every run, not on
some. On a GPU the copies run on a stream of their own after random pauses, as those of a real backend do.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.helpers.stream_order import order_here, stream_order

from sdp_deepspeed.distributed.communicator import Communicator
from tests.helpers.threads import in_threads

TIMEOUT = 240.0  # seconds
MAX_PAUSE = 2_000_000  # cycles of a GPU's clock, about a millisecond


@dataclass
class Letter:
    """What one rank gave to one collective; `values` by kind: a tensor, splits, a picklable object."""

    kind: str
    values: Any
    ready: Any = None  # event on the sender's stream
    copied: Any = None  # event on the receiver's side stream


class Office:
    """Where letters lie; collectives are matched by their number, as a real backend does.

    Args:
        size: number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._letters: dict[int, dict[int, Letter]] = {}
        self._failure: BaseException | None = None

    def enter(self) -> None:
        """One rank works at a time, until it waits for others: threads that fight for the interpreter take longer."""
        self._condition.acquire()

    def leave(self) -> None:
        self._condition.release()

    def post(self, number: int, rank: int, letter: Letter) -> None:
        self._letters.setdefault(number, {})[rank] = letter
        if len(self._letters[number]) == self.size:
            self._condition.notify_all()

    def collect(self, number: int, what: Callable[[Letter], Any] = lambda letter: letter) -> list[Letter]:
        """All ranks' letters, once `what` of each is there."""

        def is_complete() -> bool:
            letters = self._letters.get(number, {})
            return self._failure is not None or (
                len(letters) == self.size and all(what(letter) for letter in letters.values())
            )

        with self._condition:
            assert self._condition.wait_for(is_complete, TIMEOUT), f"collective {number}: a rank does not come"
            if self._failure is not None:
                raise self._failure
            letters = [self._letters[number][rank] for rank in range(self.size)]
        assert len({letter.kind for letter in letters}) == 1, [letter.kind for letter in letters]
        return letters

    def fail(self, error: BaseException) -> None:
        """All ranks raise the first one's."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def stir(self) -> None:
        with self._condition:
            self._condition.notify_all()


@dataclass
class Mailbox:
    """The functions of `torch.distributed` that `Communicator` calls, for one rank.

    Attributes:
        amounts: elements sent and received in each all-to-all.
        live: all-to-alls that were started and not waited for.
        most_live: at one time.
    """

    office: Office
    rank: int
    device: torch.device
    amounts: list[tuple[int, int]] = field(default_factory=list)
    live: int = 0
    most_live: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.chance = random.Random(self.rank)
        self.order = order_here()
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def get_rank(self, group: None) -> int:
        return self.rank

    def get_world_size(self, group: None) -> int:
        return self.office.size

    def post(self, kind: str, values: Any) -> int:
        ready = None
        if self.side is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        self.number += 1
        self.office.post(self.number, self.rank, Letter(kind, values, ready))
        return self.number

    def all_to_all_single(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        out_splits: list[int],
        in_splits: list[int],
        *,
        group: None,
        async_op: bool,
    ) -> Delivery:
        assert async_op
        end = None if self.order is None else self.order.collective(received, sent)
        with nullcontext() if self.order is None else self.order.off():
            return self._start(received, sent, out_splits, in_splits, end)

    def _start(
        self, received: torch.Tensor, sent: torch.Tensor, out_splits: list[int], in_splits: list[int], end: Any
    ) -> Delivery:
        assert received.is_contiguous()
        assert sent.is_contiguous()
        assert (sum(out_splits), sum(in_splits)) == (received.numel(), sent.numel())
        received.fill_(torch.nan)
        self.amounts.append((sent.numel(), received.numel()))
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        return Delivery(self, self.post("all-to-all", (sent, in_splits)), (received, out_splits), sent, end)

    def all_reduce(self, tensor: torch.Tensor, *, group: None) -> None:
        letters = self.office.collect(self.post("sum", tensor.detach().to("cpu", copy=True)))
        tensor.copy_(torch.stack([letter.values for letter in letters]).sum(0))

    def all_gather_object(self, values: list[Any], value: Any, *, group: None) -> None:
        values[:] = [letter.values for letter in self.office.collect(self.post("objects", value))]


class Delivery:
    """An all-to-all that runs: nothing has arrived, and nothing was taken."""

    def __init__(
        self, box: Mailbox, number: int, received: tuple[torch.Tensor, Sequence[int]], sent: torch.Tensor, end: Any
    ) -> None:
        self._box, self._number, self._sent, self._end = box, number, sent, end
        self._received, self._splits = received
        self._before = sent.clone() if box.side is None else None
        self._waited = False

    def wait(self) -> None:
        order = self._box.order
        with nullcontext() if order is None else order.off():
            self._wait()
        if order is not None:
            order.current.wait_event(self._end)

    def _wait(self) -> None:
        box = self._box
        assert not self._waited, "waited for twice"
        self._waited = True
        letters = box.office.collect(self._number)
        if self._before is not None:
            assert torch.equal(self._before.nan_to_num(7), self._sent.nan_to_num(7)), "sent tensor was changed"
            assert bool(self._received.isnan().all()), "received tensor was written to"
        letters[box.rank].copied = self._copy(letters)
        box.office.stir()
        for letter in box.office.collect(self._number, lambda letter: letter.copied):
            if box.side is not None:
                torch.cuda.current_stream(box.device).wait_event(letter.copied)
        letters[box.rank].values = None
        box.live -= 1

    def _copy(self, letters: Sequence[Letter]) -> Any:
        box, parts = self._box, self._received.split(list(self._splits))
        with torch.cuda.stream(box.side) if box.side is not None else nullcontext():
            for letter in letters:
                if box.side is not None:
                    box.side.wait_event(letter.ready)
            if box.side is not None:
                torch.cuda._sleep(box.chance.randrange(MAX_PAUSE))
            for part, letter in zip(parts, letters, strict=True):
                sent, splits = letter.values
                assert splits[box.rank] == part.numel(), "ranks do not agree on what they exchange"
                part.copy_(sent.split(splits)[box.rank])
        if box.side is None:
            return True
        copied = torch.cuda.Event()
        copied.record(box.side)
        return copied


def run_mail(
    size: int,
    work: Callable[[Communicator, Mailbox], Any],
    *,
    device: torch.device | None = None,
    checks_order: bool = False,
) -> list[Any]:
    """Results of `work` by rank; the first rank's own error is raised.

    Args:
        device: of the tensors that travel; None is the CPU. On a GPU each rank has a stream of its own.
        checks_order: inside `pretended_streams`: as on a GPU, and each rank's `stream_order` is checked.
    """
    office, place = Office(size), device or torch.device("cpu")

    def call(rank: int) -> Any:
        try:
            office.enter()
            with stream_order() if checks_order else nullcontext():
                box = Mailbox(office, rank, place)
                stream = torch.cuda.Stream(place) if checks_order or place.type == "cuda" else None
                # Else all ranks' backward passes would share the one thread that autograd has for a GPU, in turn.
                alone = torch.autograd.set_multithreading_enabled(False)
                with alone, torch.cuda.stream(stream) if stream is not None else nullcontext():
                    result = work(Communicator(box), box)
            assert box.live == 0, f"rank {rank} did not wait for {box.live} collectives"
        except BaseException as error:
            office.fail(error)
            raise
        finally:
            office.leave()
        return result

    return in_threads(call, size)
