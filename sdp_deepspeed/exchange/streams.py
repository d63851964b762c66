"""Which stream of a GPU an exchange runs on: the caller's, and beside it one of the exchange's own.

What is sent is packed on the caller's stream, so that gradients may be freed or added to right after it. All that waits
for a collective runs on the other one. Nothing here blocks the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class NoStreams:
    """A CPU's: everything is done in the order of the calls."""

    def beside(self) -> AbstractContextManager[None]:
        """The block runs on the exchange's stream, after all that the current one has been given.

        After all of it, so that memory which one stream has freed and the other gets is in nobody's use.
        """
        return nullcontext()

    def join(self) -> None:
        """The current stream waits for all that the exchange's has been given."""

    def mark(self) -> Any:
        """A point of the current stream: the end of what it has been given."""
        return None

    def wait(self, mark: Any) -> None:
        """The current stream waits for a point of another one; None is no point."""

    def record(self, memory: torch.Tensor) -> None:
        """Once this memory is freed, nobody gets it before the current stream has come to its present end."""

    def note(self) -> None:
        """The current stream computes gradients. (Hooks run where the forward pass was.)"""

    def after_noted(self) -> AbstractContextManager[None]:
        """The block reads gradients of all noted streams, and frees them."""
        return nullcontext()

    def forget(self) -> None:
        """No stream is noted any more: a backward pass is over."""


class GpuStreams(NoStreams):
    """A GPU's.

    Args:
        device: the GPU.
        overlaps: whether the exchange has a stream of its own; else it runs on the current one.
    """

    def __init__(self, device: torch.device, *, overlaps: bool) -> None:
        self._device = device
        # Its kernels are few, and collectives wait for them: they go before those of backward.
        self._own: Any = torch.cuda.Stream(device, priority=-1) if overlaps else None
        self._noted: set[Any] = set()

    @contextmanager
    def beside(self) -> Iterator[None]:
        if self._own is None:
            yield
            return
        self._own.wait_stream(self._current())
        with torch.cuda.stream(self._own):
            yield

    def join(self) -> None:
        if self._own is not None:
            self._current().wait_stream(self._own)

    def mark(self) -> Any:
        return self._current().record_event()

    def wait(self, mark: Any) -> None:
        if mark is not None:
            self._current().wait_event(mark)

    def record(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._current())

    def note(self) -> None:
        self._noted.add(self._current())

    @contextmanager
    def after_noted(self) -> Iterator[None]:
        current = self._current()
        others = self._noted - {current}
        for stream in others:
            current.wait_stream(stream)
        yield
        for stream in others:  # they get the memory that the block has freed
            stream.wait_stream(current)

    def forget(self) -> None:
        self._noted.clear()

    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)


def streams_of(device: torch.device, *, overlaps: bool) -> NoStreams:
    """Where exchanges of tensors on `device` run.

    Args:
        overlaps: whether anything may go on while they do.
    """
    return GpuStreams(device, overlaps=overlaps) if device.type == "cuda" else NoStreams()
