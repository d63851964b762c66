"""A snapshot on its way to host memory: the training thread copies, and another one writes what has arrived."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, StateDict
from sdp_deepspeed.checkpoint.state.host_copies import HostCopies, Mark

SLAB_BYTES = 64 * 2**20


class HostMemory:
    """For one snapshot; kept from the first on, as getting memory from the system takes longer than copying to it."""

    def __init__(self) -> None:
        self._bytes = _bytes(0)

    def take(self, num_bytes: int) -> torch.Tensor:
        """So many bytes; whoever took them before has lost them."""
        if self._bytes.numel() < num_bytes:
            self._bytes = _bytes(0)  # there may be no room for both
            self._bytes = _bytes(num_bytes).zero_()  # its pages are got now, and not beside who fills the page cache
        return self._bytes.narrow(0, 0, num_bytes)


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


class Arrivals:
    """How far a copy has come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_bytes = 0
        self._error: BaseException | None = None

    def reach(self, num_bytes: int) -> None:
        with self._changed:
            self._num_bytes = num_bytes
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait(self, num_bytes: int) -> None:
        """Until so many are there.

        Raises:
            RuntimeError: they will not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._num_bytes >= num_bytes)
            if self._error is not None:
                raise RuntimeError(f"checkpoint: it could not be copied to host memory: {self._error!r}")


class ArrivingChunks(Chunks):
    """Copies; who asks for one waits until it is there."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, arrivals: Arrivals) -> None:
        super().__init__(shape, dtype)
        self._arrivals = arrivals
        self._ends: dict[tuple[int, ...], int] = {}

    def add_arriving(self, box: Box, values: torch.Tensor, end: int) -> None:
        """A box that is there when all up to `end` are."""
        self.add(box, values)
        self._ends[box.offsets] = end

    def at(self, offsets: Sequence[int]) -> torch.Tensor:
        self._arrivals.wait(self._ends[tuple(offsets)])
        return super().at(offsets)


@dataclass(frozen=True)
class _Part:
    """Values, and where they go."""

    start: int
    source: torch.Tensor
    target: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + self.source.nbytes


class HostCopy:
    """Of one snapshot. Chunks lie in the order in which they are written to the file, but for those that are on a
    device, which come last.

    Args:
        chunks: views of live tensors.
        memory: nobody else may take of it until this copy is written.

    Attributes:
        chunks: the same, in host memory, as they arrive.
    """

    def __init__(self, chunks: StateDict, memory: HostMemory) -> None:
        self._arrivals = Arrivals()
        self.chunks: StateDict = {
            key: ArrivingChunks(of_tensor.shape, of_tensor.dtype, self._arrivals) for key, of_tensor in chunks.items()
        }
        everything = [(key, box, values) for key, of_tensor in chunks.items() for box, values in of_tensor.items()]
        everything.sort(key=lambda chunk: (chunk[2].device.type != "cpu", -chunk[2].itemsize))
        starts, size = list[int](), 0
        for _, _, values in everything:
            starts.append(-(-size // values.itemsize) * values.itemsize)
            size = starts[-1] + values.nbytes
        self._room = memory.take(size)
        self._parts: list[_Part] = []
        for start, (key, box, values) in zip(starts, everything, strict=True):
            target = self._room.narrow(0, start, values.nbytes).view(values.dtype).view(values.shape)
            self._parts.append(_Part(start, values.detach(), target))
            arriving = self.chunks[key]
            assert isinstance(arriving, ArrivingChunks)
            arriving.add_arriving(box, target, self._parts[-1].end)

    def run(self) -> None:
        """Copy everything; afterward the live tensors may change. An error is raised where chunks are waited for."""
        try:
            self._copy()
        except Exception as problem:
            self._arrivals.fail(problem)
        except BaseException as problem:  # Ctrl-C: whoever waits must not do so for ever
            self._arrivals.fail(problem)
            raise

    def _copy(self) -> None:
        on_device = [part for part in self._parts if part.source.device.type != "cpu"]
        for part in self._parts[: len(self._parts) - len(on_device)]:
            part.target.copy_(part.source)
            self._arrivals.reach(part.end)
        if on_device:
            self._copy_from(on_device, HostCopies(on_device[0].source.device), SLAB_BYTES)

    def _copy_from(self, parts: list[_Part], copies: HostCopies, slab_bytes: int) -> None:
        """Through two page-locked slabs: the device fills one while this thread empties the other. Memory that the
        device could write to directly would have to be page-locked as a whole.

        Args:
            parts: one after the other in memory.
        """
        free = deque(copies.memory(slab_bytes, torch.uint8) for _ in range(2))
        filled: deque[tuple[torch.Tensor, int, int, Mark]] = deque()
        start = stop = parts[0].start

        def empty() -> None:
            slab, first, last, mark = filled.popleft()
            mark.synchronize()
            self._room[first:last].copy_(slab[: last - first])
            self._arrivals.reach(last)
            free.append(slab)

        for values in (values for part in parts for values in pieces_of(part.source, slab_bytes)):
            if stop + values.nbytes - start > slab_bytes:
                filled.append((free.popleft(), start, stop, copies.mark()))
                start = stop
                if not free:
                    empty()
            place = free[0].narrow(0, stop - start, values.nbytes)
            copies.copy(place.view(values.dtype).view(values.shape), values)
            stop += values.nbytes
        filled.append((free.popleft(), start, stop, copies.mark()))
        while filled:
            empty()


def pieces_of(values: torch.Tensor, max_bytes: int) -> Iterator[torch.Tensor]:
    """Views of `values`, one after the other in row-major order, none larger than so many bytes."""
    if values.nbytes <= max_bytes:
        yield values
        return
    if values.is_contiguous():
        yield from values.view(-1).split(max_bytes // values.itemsize)
        return
    row_bytes = prod(values.shape[1:]) * values.itemsize
    if row_bytes <= max_bytes:
        yield from values.split(max_bytes // row_bytes)
    else:
        for row in values:
            yield from pieces_of(row, max_bytes)
