"""Streams of a GPU that does not exist: the order in which it could run things is worked out, not tried.

Operations run on the CPU, at once. Each belongs to the stream that is current. Whatever bytes it reads or writes must
have been left alone by all operations that a GPU might run at the same time, or later: streams are ordered by what they
wait for, and by nothing else. Memory that was freed belongs to the stream it came from, as PyTorch's allocator has it:
the next allocation there may get it, whoever still uses it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import local
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sdp_deepspeed.exchange.streams import GpuStreams
from sdp_deepspeed.optimizer import exchanges

Clock = Counter[int]  # by stream, how many of its operations come before


class Event:
    """A point of a stream."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock


class Stream:
    """What the package asks of `torch.cuda.Stream`.

    Args:
        number: 0 is the default stream.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.clock: Clock = Counter()

    def record_event(self) -> Event:
        return Event(self.clock.copy())

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock  # the larger of both

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class _Memory:
    """Of one storage: for each byte the last operations that wrote and read it, by stream.

    Args:
        home: the stream that it was allocated on.
    """

    def __init__(self, storage: torch.UntypedStorage, home: Stream) -> None:
        self.reference = StorageWeakRef(storage)
        self.home = home
        self.num_bytes = storage.nbytes()
        self.last: dict[tuple[int, bool], np.ndarray] = {}  # by stream, and whether it wrote
        self.is_recorded = False  # the allocator waits by itself

    def parts(self, tensor: torch.Tensor) -> Iterator[tuple[int, bool, np.ndarray]]:
        """What is known of the bytes of a tensor: stream, whether it wrote, and when."""
        for (stream, wrote), bytes_of in self.last.items():
            yield stream, wrote, self._bytes(tensor, bytes_of)

    def set(self, tensor: torch.Tensor, stream: Stream, *, wrote: bool) -> None:
        key = stream.number, wrote
        if key not in self.last:
            self.last[key] = np.zeros(self.num_bytes, dtype=np.int64)
        self._bytes(tensor, self.last[key])[...] = stream.clock[stream.number]

    @staticmethod
    def _bytes(tensor: torch.Tensor, bytes_of: np.ndarray) -> np.ndarray:
        size = tensor.element_size()
        strides = [stride * size * bytes_of.itemsize for stride in tensor.stride()]
        start = bytes_of[tensor.storage_offset() * size :]
        return np.lib.stride_tricks.as_strided(start, (*tensor.shape, size), (*strides, bytes_of.itemsize))


class StreamOrder(TorchDispatchMode):
    """The streams of one rank. An AssertionError says what could happen at the same time.

    Attributes:
        current: stream.
        collectives: numbers of their streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self.current = self.new_stream()
        self.collectives: list[int] = []
        self._memory: dict[int, _Memory] = {}
        self._is_off = False

    def new_stream(self) -> Stream:
        return Stream(next(self._numbers))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def off(self) -> Iterator[None]:
        """What runs in the block is no operation of this rank's GPU."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def collective(self, received: torch.Tensor, sent: torch.Tensor) -> Event:
        """Runs on a stream of its own, so that no other one that is done says anything of it; its end."""
        wire = self.new_stream()
        self.collectives.append(wire.number)
        wire.wait_stream(self.current)
        with self.on(wire):
            self.operation("a collective", [sent], [received])
        return wire.record_event()

    def operation(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """The current stream is given one."""
        self.current.clock[self.current.number] += 1
        for wrote, tensors in ((False, read), (True, written)):
            for tensor in tensors:
                if tensor.numel():
                    memory = self._memory_of(tensor)
                    self._check(name, tensor, memory, wrote)
                    memory.set(tensor, self.current, wrote=wrote)

    def record(self, tensor: torch.Tensor) -> None:
        """`record_stream` was called."""
        self._memory_of(tensor).is_recorded = True

    def _check(self, name: str, tensor: torch.Tensor, memory: _Memory, writes: bool) -> None:
        for stream, wrote, times in memory.parts(tensor):
            if (writes or wrote) and times.max() > self.current.clock[stream]:
                verb = "writes" if writes else "reads"
                done = "writes" if wrote else "reads"
                message = f"{name} {verb} on stream {self.current.number} what stream {stream} {done}, without a wait"
                raise AssertionError(message)

    def _memory_of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            self._reuse()
            self._memory[storage._cdata] = _Memory(storage, self.current)
        return self._memory[storage._cdata]

    def _reuse(self) -> None:
        """The current stream allocates: it may get any memory that was freed and is its own."""
        for key, memory in list(self._memory.items()):
            if memory.home is self.current and memory.reference.expired():
                for (stream, _), times in () if memory.is_recorded else memory.last.items():
                    message = f"stream {memory.home.number} may get memory that was freed while stream {stream} uses it"
                    assert times.max() <= self.current.clock[stream], message
                del self._memory[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_off or func.is_view:
            return result
        given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False)) | kwargs
        tensors: dict[bool, list[torch.Tensor]] = {False: [], True: _tensors(result)}
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            tensors[is_written] += _tensors(given.get(argument.name))
        self.operation(func.__name__, tensors[False], tensors[True])
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


_HERE = local()


@contextmanager
def stream_order() -> Iterator[StreamOrder]:
    """This thread's operations are checked in the block."""
    with StreamOrder() as order:
        _HERE.order = order
        try:
            yield order
        finally:
            del _HERE.order


def order_here() -> StreamOrder | None:
    """This thread's."""
    return getattr(_HERE, "order", None)


@contextmanager
def pretended_streams() -> Iterator[None]:
    """`torch.cuda` has streams, those of each thread's `stream_order`."""

    def order() -> StreamOrder:
        found = order_here()
        assert found is not None
        return found

    with ExitStack() as stack:
        for name, pretended in {
            "Stream": lambda *arguments, **options: order().new_stream(),
            "current_stream": lambda *arguments: order().current,
            "stream": lambda stream: order().on(stream),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, pretended))
        recorded = mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: order().record(tensor))
        stack.enter_context(recorded)
        yield


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Exchanges on the CPU have streams, where they would on a GPU."""

    with pretended_streams(), mock.patch.object(exchanges, "streams_of", GpuStreams):
        yield


class MoreStreams:
    """Those that gradients are computed on, beside the caller's."""

    def __init__(self, number: int, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(number)]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Forward and backward of the block are on the one of this parameter: autograd adds up its gradients there."""
        if not self._streams:
            yield
            return
        stream = self._streams[sum(name.encode()) % len(self._streams)]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """As autograd does when a backward pass ends."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
