"""An optimizer that steps in host memory (DeepSpeed's `offload_optimizer`): gradients come, rounded weights go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle

import torch

from sdp_deepspeed.layout.cuts import one_after_the_other
from sdp_deepspeed.layout.fragments import Fragment, Transfer
from sdp_deepspeed.optimizer.host_copies import HostCopies, Mark
from sdp_deepspeed.optimizer.settings import Offload
from sdp_deepspeed.units import Piece

CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Chunk:
    """Fragments that are side by side in a master and have one dtype in the weights.

    Args:
        start: of the first of them in the master.
    """

    start: int
    dtype: torch.dtype
    fragments: list[Fragment]

    @property
    def sizes(self) -> list[int]:
        return [fragment.num_elements for fragment in self.fragments]

    @cached_property
    def transfer(self) -> Transfer:
        """Between the weights and the part of the master."""
        return Transfer(self.fragments, one_after_the_other(self.sizes))


def chunks_of(
    fragments: Sequence[Fragment], dtype_of: Callable[[Piece], torch.dtype], *, max_bytes: int
) -> list[Chunk]:
    """All fragments of a master, in parts whose weights have at most so many bytes; large fragments are cut."""
    chunks: list[Chunk] = []
    room, position = 0, 0
    for fragment in fragments:
        dtype, start = dtype_of(fragment.piece), fragment.start
        while start < fragment.stop:
            if not chunks or not room or chunks[-1].dtype != dtype:
                chunks.append(Chunk(position, dtype, []))
                room = max(1, max_bytes // dtype.itemsize)
            part = Fragment(fragment.piece, start, min(fragment.stop, start + room))
            chunks[-1].fragments.append(part)
            start, room, position = part.stop, room - part.num_elements, position + part.num_elements
    return chunks


class HostStep:
    """The way to host memory and back, of one optimizer; what it needs there it keeps: a gradient as large as the
    master for each param group, and two buffers for weights, which the host fills in turn while the device empties the
    other.

    Args:
        copies: None where the weights are in host memory too, so that there is no way.
        chunk_bytes: of one buffer.
    """

    def __init__(self, copies: HostCopies | None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._copies = copies
        self._chunk_bytes = chunk_bytes
        self._buffers: list[tuple[torch.Tensor, list[Mark]]] = []  # with what must be reached before it is filled again
        self._gradients: dict[int, torch.Tensor] = {}

    @classmethod
    def build(cls, device: torch.device, offload: Offload | None) -> HostStep | None:
        """
        Args:
            device: of the weights.
            offload: None to step there.
        """
        if offload is None:
            return None
        return cls(HostCopies(device, pin_memory=offload.pin_memory) if device.type != "cpu" else None)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the weights are."""
        return self._copies is not None

    def chunks(self, fragments: Sequence[Fragment], dtype_of: Callable[[Piece], torch.dtype]) -> list[Chunk]:
        """Of a master, as `send` takes them; none where nothing is sent."""
        return [] if self._copies is None else chunks_of(fragments, dtype_of, max_bytes=self._chunk_bytes)

    def receive(self, flat: torch.Tensor, key: int) -> torch.Tensor:
        """A gradient in host memory, which has its values after `wait`.

        Args:
            key: of the param group.
        """
        if self._copies is None:
            return flat
        if key not in self._gradients:
            self._gradients[key] = self._copies.memory(flat.numel(), flat.dtype)
        self._copies.copy(self._gradients[key], flat)
        return self._gradients[key]

    def wait(self) -> None:
        """Until all that was received is there."""
        if self._copies is not None:
            self._copies.mark().synchronize()

    def send(self, master: torch.Tensor, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """A master rounded to the weights' dtype, chunk by chunk on their device; each to be used before the next."""
        copies = self._copies
        assert copies is not None, "the weights are where the master is"
        if not self._buffers:
            self._buffers = [(copies.memory(self._chunk_bytes, torch.uint8), []) for _ in range(2)]
        for chunk, (buffer, marks) in zip(chunks, cycle(self._buffers), strict=False):
            if marks:
                marks.pop().synchronize()
            size = sum(chunk.sizes)
            staged = buffer.narrow(0, 0, size * chunk.dtype.itemsize).view(chunk.dtype)
            staged.copy_(master.narrow(0, chunk.start, size))
            values = torch.empty(size, dtype=chunk.dtype, device=copies.device)
            copies.copy(values, staged)
            marks.append(copies.mark())
            yield chunk, values
