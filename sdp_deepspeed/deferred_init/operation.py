"""One operation of an initialization, and the tensors that it is about, without their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


def address(tensor: torch.Tensor) -> int:
    """Of the tensor's storage, with or without data; no other storage has it as long as this one lives."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Ref:
    """A tensor as a view into a storage, without data.

    Args:
        storage: its address.
        offset, size, stride: in elements.
    """

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Ref:
        offset = int(tensor.storage_offset())
        return cls(address(tensor), offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie without gaps or overlaps."""
        return _follow(sorted(zip(self.stride, self.size, strict=True)))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie in the order of their indices."""
        return _follow(reversed(list(zip(self.stride, self.size, strict=True))))

    @property
    def num_elements(self) -> int:
        return torch.Size(self.size).numel()

    def covers(self, num_bytes: int) -> bool:
        """Whether it is all of a storage of that size."""
        return self.offset == 0 and self.is_dense and self.num_elements * self.dtype.itemsize == num_bytes

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in a storage with data."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> torch.Tensor:
        """A tensor of the same layout for values that nobody needs."""
        pairs = zip(self.size, self.stride, strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in pairs) if 0 not in self.size else 0
        return torch.empty(count, dtype=self.dtype, device="cpu").as_strided(self.size, self.stride)


def _follow(dims: Iterable[tuple[int, int]]) -> bool:
    """Whether each dim (stride, size) steps over just those before it."""
    expected = 1
    for stride, size in dims:
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Operation:
    """One call of the constructor, to be made again.

    Args:
        call: with `args` and `kwargs`, in which tensors without data are `Ref`s.
        births: outputs that got a storage of their own, by their position among all outputs.
        targets: what is written in place.
        reads: storages whose values it needs.
        replaces: storages of which it leaves nothing as it was.
        is_random: whether it draws from the random stream.
    """

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    births: tuple[tuple[int, Ref], ...] = ()
    targets: tuple[Ref, ...] = ()
    reads: frozenset[int] = frozenset()
    replaces: frozenset[int] = frozenset()
    is_random: bool = False

    @property
    def writes(self) -> frozenset[int]:
        return frozenset(ref.storage for ref in (*(ref for _, ref in self.births), *self.targets))
