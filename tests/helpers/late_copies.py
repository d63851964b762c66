"""A device whose copies are as late as a device's may be; its tensors are in host memory all the same."""

from __future__ import annotations

import torch

from sdp_deepspeed.checkpoint.state.host_copies import HostCopies


class LateCopies(HostCopies):
    """What goes to the host is there when a mark behind it is reached, and not a number before. What the device reads
    on the host must not change until then.

    Attributes:
        num_bytes: of each piece of memory that was asked for.
        num_waits: marks that were waited for.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), pin_memory=False)
        self.num_bytes: list[int] = []
        self.num_waits = 0
        self._memory: set[int] = set()  # storages on the host
        self._running: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def memory(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        result = super().memory(num_elements, dtype)
        self.num_bytes.append(result.nbytes)
        self._memory.add(result.untyped_storage().data_ptr())
        return result

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        here = [tensor.untyped_storage().data_ptr() in self._memory for tensor in (target, source)]
        assert sum(here) == 1, "one of them is on the host"
        self._running.append((target, source, source.clone()))
        if here[0]:
            target.fill_(torch.nan)
        else:
            target.copy_(source)  # what the device does with it afterward is behind this copy

    def mark(self) -> Mark:
        return Mark(self, len(self._running))

    def _reach(self, place: int) -> None:
        self.num_waits += 1
        for target, source, then in self._running[:place]:
            if source.untyped_storage().data_ptr() in self._memory:
                assert torch.equal(source, then), "a buffer was filled again while the device read it"
            else:
                target.copy_(then)
        self._running[:place] = [(torch.empty(0), torch.empty(0), torch.empty(0))] * place


class Mark:
    def __init__(self, copies: LateCopies, place: int) -> None:
        self._copies, self._place = copies, place

    def synchronize(self) -> None:
        self._copies._reach(self._place)
