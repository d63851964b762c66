"""The dense model's parts on their way to the ranks that run them: each comes while the one before it computes.

In a pass of the model every rank fetches all parts in the module's order, whatever it runs of them. So a part that one
rank leaves out, or comes back to, puts no other rank's collectives out of step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from sdp_deepspeed.exchange.exchange import Steps
from sdp_deepspeed.masking.part import DenseTensors, MaskedPart
from sdp_deepspeed.units import Piece

Targets = Callable[[], Mapping[Piece, torch.Tensor]]
Fetcher = Callable[[int, Targets, int], Steps]
"""Fetches the part of an index to where the function makes room for it, with so many rounds under way; a collective."""
_ROUNDS_AHEAD = 2  # each of half a part at most


class _Coming:
    """A part on its way. On a GPU all of it comes on a stream beside the one that computes."""

    def __init__(self, part: MaskedPart, fetch: Callable[[Targets], Steps], stream: torch.cuda.Stream | None) -> None:
        self._part = part
        self._stream = stream
        self._dense: DenseTensors | None = None
        self._steps = fetch(self._targets)

    def _targets(self) -> Mapping[Piece, torch.Tensor]:
        if self._dense is None:
            self._dense = self._part.allocate()
        return self._dense.targets

    def begin(self) -> None:
        """At most one part's bytes in buffers."""
        if self._stream is None:
            next(self._steps)
            return
        self._targets()  # in the memory of the stream that will use it, which waits for the other below
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            deque(self._steps, maxlen=0)

    def settle(self) -> None:
        """What was allocated here may be used here."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def finish(self) -> DenseTensors:
        deque(self._steps, maxlen=0)
        self.settle()
        assert self._dense is not None
        self._part.complete(self._dense)
        return self._dense


class PartStream:
    """Parts one after the other, or all of them kept; every rank calls the same, but for `take`.

    Args:
        parts: in the module's order.
        fetch: of all ranks.
        agree: all ranks want the same part, out of the order; RuntimeError on all of them if not.
        device: where parts are.

    Attributes:
        kept: parts that stay from pass to pass; all or none between passes.
        in_pass: between `begin` and `end`.
    """

    def __init__(
        self,
        parts: Sequence[MaskedPart],
        fetch: Fetcher,
        *,
        agree: Callable[[tuple[int, int, bool]], None],
        device: torch.device,
    ) -> None:
        self._parts = parts
        self._fetch = fetch
        self._agree = agree
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._coming: _Coming | None = None  # the part that `_next` is
        self._next = 0
        self._keeps = False
        self._ahead = False
        self.kept: dict[int, DenseTensors] = {}
        self.in_pass = False

    def begin(self, *, keeps: bool, ahead: bool) -> None:
        """A pass of the model.

        Args:
            keeps: parts for the passes after it; if they were kept before it, nothing is fetched.
            ahead: begin to fetch a part before the one before it computes.
        """
        self.end()
        self._settle()
        if not keeps:
            self.drop()
        self._next = len(self.kept)
        self._keeps, self._ahead, self.in_pass = keeps, ahead, True

    def end(self) -> None:
        """Of the pass, however it ended: what is left of it comes too, as it comes on other ranks."""
        if self.in_pass:
            self.in_pass = False
            while self._next < len(self._parts):
                self._arrive()

    def drop(self) -> None:
        """Give what is kept back."""
        self.kept.clear()

    def _settle(self) -> None:
        """After an error in a collective: nothing of it is used."""
        if self._coming is not None:
            self._coming.settle()
        self._coming = None
        self.in_pass = False

    def take(self, index: int) -> DenseTensors:
        """The part, complete. In a pass ranks may leave parts out; one that was there before they agree on, and fetch
        it again. Between passes all take the same parts in the same order."""
        if self.in_pass and index in self.kept:
            return self.kept[index]
        if self.in_pass and index < self._next:
            self._agree((index, self._next, self._coming is not None))
        if not self.in_pass or index < self._next:
            return self._begun(index).finish()
        while self._next < index:
            self._arrive()
        return self._arrive()

    def _arrive(self) -> DenseTensors:
        """The next part of the pass; the one after it sets out."""
        index, self._next = self._next, len(self._parts)  # after an error in a collective there are no more
        coming, self._coming = self._coming or self._begun(index), None
        dense = coming.finish()
        if self._keeps:
            self.kept[index] = dense
        if self._ahead and index + 1 < len(self._parts):
            self._coming = self._begun(index + 1)
        self._next = index + 1
        return dense

    def _begun(self, index: int) -> _Coming:
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        num_rounds = _ROUNDS_AHEAD if self._ahead else 1
        coming = _Coming(self._parts[index], lambda targets: self._fetch(index, targets, num_rounds), self._stream)
        coming.begin()
        return coming
