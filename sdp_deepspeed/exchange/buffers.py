"""Memory of what travels: lent to one collective after the other, at the same addresses in each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sdp_deepspeed.exchange.streams import NoStreams


@dataclass(eq=False)
class _Block:
    """Memory that is lent as a whole.

    Args:
        number: of the block, for one order in all steps.
        last_use: after which the next one may begin.
        tensors: in which it has been lent.
    """

    memory: torch.Tensor
    number: int
    last_use: Any = None
    tensors: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.memory.numel()

    def tensor(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The same object each time, so that views of it can be kept."""
        key = num_elements, dtype
        if key not in self.tensors:
            self.tensors[key] = self.memory[: num_elements * dtype.itemsize].view(dtype)
        return self.tensors[key]


class Buffers:
    """As many blocks as were ever lent at one time, each as large as the largest of what it was lent for.

    The same calls in each step get the same addresses, once the blocks have grown to their size.

    Args:
        device: where they live.
        streams: whose points say when a block is free.
        is_kept: blocks stay; else there are none, and what is taken lives as long as somebody has it, also after an
            error.
    """

    def __init__(self, device: torch.device, streams: NoStreams | None = None, *, is_kept: bool = True) -> None:
        self._device = device
        self.streams = streams or NoStreams()
        self._is_kept = is_kept
        self._num_made = 0
        self._free: list[_Block] = []
        self._lent: dict[int, _Block] = {}

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return sum(block.num_bytes for block in [*self._free, *self._lent.values()])

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor for the current stream, with anything in it."""
        if not num_elements or not self._is_kept:
            return torch.empty(num_elements, dtype=dtype, device=self._device)
        block = self._block(num_elements * dtype.itemsize)
        tensor = block.tensor(num_elements, dtype)
        self._lent[id(tensor)] = block
        return tensor

    def give(self, tensor: torch.Tensor) -> None:
        """What was taken is used no more once the current stream gets here."""
        block = self._lent.pop(id(tensor), None)
        if block is not None:
            block.last_use = self.streams.mark()
            self._free.append(block)

    def _block(self, num_bytes: int) -> _Block:
        """The smallest that is large enough, or in place of the largest a new one."""
        self._free.sort(key=lambda block: (block.num_bytes, block.number))
        index = next((i for i, block in enumerate(self._free) if block.num_bytes >= num_bytes), -1)
        if self._free:
            block = self._free.pop(index)
            self.streams.wait(block.last_use)
            if block.num_bytes >= num_bytes:
                return block
            self.streams.record(block.memory)  # it goes back to the stream that it came from, which may be another
            block.memory.untyped_storage().resize_(0)  # now, though somebody keeps views of it
            del block
        self._num_made += 1
        return _Block(torch.empty(num_bytes, dtype=torch.uint8, device=self._device), self._num_made)
