"""What a rank holds of the dense model under FSDP2, in the dense model's coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class HeldTensor:
    """A parameter of this rank's subnetwork, which is one tensor (of a shape `S`) sharded over its holders.

    FSDP2 cuts `S` along its first dim into as many chunks as there are holders, as `torch.chunk` does.

    Args:
        name: in `named_parameters()` of this rank's module.
        dense_name: of the dense model's parameter that it is, or is a part of.
        dim: of the dense parameter along which it is a part; None if it is the whole.
        intervals: (start, length) along `dim`, which lie one after the other in `S`; empty for the whole.
        holders: ranks of the mesh, ascending.
    """

    name: str
    dense_name: str
    dim: int | None
    intervals: tuple[tuple[int, int], ...]
    holders: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.dim is None

    def shape(self, dense_shape: Sequence[int]) -> tuple[int, ...]:
        """`S`, from the shape of the dense parameter."""
        if self.dim is None:
            return tuple(dense_shape)
        length = sum(length for _, length in self.intervals)
        return tuple(length if dim == self.dim else size for dim, size in enumerate(dense_shape))


@dataclass(frozen=True)
class ShardedUnit:
    """Modules that FSDP2 gathers and averages together, over the ranks that hold them; every rank has the same units.

    Args:
        name: of the plan's unit, or of a part of it whose holders are the same.
        holders: ranks of the mesh, ascending.
        modules: of this rank, in the order in which they run; none where it lacks the unit.
        tensors: of this rank; none where it lacks the unit.
        ends: names of the first and the last module, on ranks that lack the unit too.
    """

    name: str
    holders: tuple[int, ...]
    modules: tuple[nn.Module, ...]
    tensors: tuple[HeldTensor, ...]
    ends: tuple[str, str]

    @property
    def is_held(self) -> bool:
        """Whether this rank holds it."""
        return bool(self.modules)

    @property
    def fsdp(self) -> Any:
        """An FSDPModule that stands for all of it."""
        return self.modules[0]


def rows_of(position: int, num_holders: int, num_rows: int) -> tuple[int, int]:
    """Start and stop of the rows that the holder at `position` stores of a tensor with `num_rows`; maybe none."""
    length = -(-num_rows // num_holders)
    return min(position * length, num_rows), min((position + 1) * length, num_rows)


def elements_of(position: int, num_holders: int, shape: Sequence[int]) -> tuple[int, int]:
    """Start and stop of the elements (row-major) that the holder at `position` stores of a tensor of `shape`."""
    row = math.prod(shape[1:])
    start, stop = rows_of(position, num_holders, shape[0])
    return start * row, stop * row


def shards(holders: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each holder's rank, with start and stop of its elements; those with none are left out."""
    for position, rank in enumerate(holders):
        start, stop = elements_of(position, len(holders), shape)
        if stop > start:
            yield rank, start, stop
