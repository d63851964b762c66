"""Many stretches of flat tensors as views, and copies between them, for a few calls.

A view that Python asks for costs 2 microseconds, one of many that a split gives a quarter of that. So what is asked for
is worked out once, as sizes to split by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch

Flats = Mapping[Any, torch.Tensor | None] | Sequence[torch.Tensor]
"""Flat tensors by what they are called; a list by index. None where there is no tensor."""


class Location(NamedTuple):
    """Where a stretch begins: in which tensor, and at which element."""

    tensor: Any  # hashable
    start: int


_BEGIN = Location(0, 0)


class Cuts:
    """Views of stretches of some flat tensors, in the order in which they are given.

    Args:
        stretches: where each begins, and its number of elements; they may overlap.

    Attributes:
        tensors: in which they lie.
        sizes: of the stretches.
    """

    def __init__(self, stretches: Sequence[tuple[Location, int]]) -> None:
        by_tensor: dict[Any, list[tuple[int, int, int]]] = {}
        for index, ((tensor, start), size) in enumerate(stretches):
            by_tensor.setdefault(tensor, []).append((start, start + size, index))
        self.tensors = tuple(by_tensor)
        self.sizes = [size for _, size in stretches]
        self._layers: list[tuple[Any, list[int], int]] = []  # a tensor, sizes to split it by, and where these end
        self._order = [0] * len(stretches)  # which of all views each of them is
        num_views = 0
        for tensor, ranges in by_tensor.items():
            for layer in _layers(sorted(ranges)):
                for index, number in layer.indices:
                    self._order[index] = num_views + number
                self._layers.append((tensor, layer.sizes, layer.stop))
                num_views += len(layer.sizes) + 1  # one for the rest of the tensor
        self._last: Callable[[], torch.Tensor | None] = lambda: None
        self._kept: list[Any] | None = None

    def of(self, flats: Flats) -> list[Any]:
        """The views; None where there is no tensor.

        Those of one tensor are kept from the second time on that it is the same object, such as a buffer that is used
        again: never those of a gradient, which would keep its memory too.
        """
        if len(self.tensors) != 1 or (flat := flats[self.tensors[0]]) is None:
            return self._made(flats)
        if self._last() is not flat:
            self._last, self._kept = ref(flat), None
            return self._made(flats)
        if self._kept is None:
            self._kept = self._made(flats)
        return self._kept

    def _made(self, flats: Flats) -> list[Any]:
        views: list[torch.Tensor | None] = []
        for tensor, sizes, end in self._layers:
            flat = flats[tensor]
            rest = 0 if flat is None else flat.numel() - end
            if flat is None:
                views += [None] * len(sizes)
            elif rest:
                views += flat.split_with_sizes([*sizes, rest])
                continue
            elif len(sizes) == 1:
                views.append(flat)
            else:
                views += flat.split_with_sizes(sizes)
            views.append(None)
        return [views[index] for index in self._order]


class _Layer:
    """Stretches of one tensor that do not overlap, ascending, but for equal ones.

    Attributes:
        sizes: to split the tensor by.
        indices: which stretch is which of the views.
        stop: of the last one.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.indices: list[tuple[int, int]] = []
        self.stop = 0

    def add(self, start: int, stop: int, index: int) -> bool:
        """Whether there is room for it."""
        if start >= self.stop:
            if start > self.stop:
                self.sizes.append(start - self.stop)
            self.sizes.append(stop - start)
            self.stop = stop
        elif stop != self.stop or stop - start != self.sizes[-1]:
            return False
        self.indices.append((index, len(self.sizes) - 1))
        return True


def _layers(ranges: Iterable[tuple[int, int, int]]) -> list[_Layer]:
    """As few as there can be.

    Args:
        ranges: start, stop and index, ascending.
    """
    layers: list[_Layer] = []
    for start, stop, index in ranges:
        for layer in layers:
            if layer.add(start, stop, index):
                break
        else:
            layers.append(_Layer())
            layers[-1].add(start, stop, index)
    return layers


class Moves:
    """Stretches of some flat tensors, and where they belong in others. Neighbors that stay neighbors move as one.

    Args:
        moves: where each begins here and there, and its number of elements.
    """

    def __init__(self, moves: Iterable[tuple[Location, Location, int]]) -> None:
        here: list[tuple[Location, int]] = []
        there: list[tuple[Location, int]] = []
        following: tuple[Any, ...] = ()  # what would go on where the last one ends
        for source, target, size in moves:
            if (*source, *target) == following:
                here[-1] = here[-1][0], here[-1][1] + size
                there[-1] = there[-1][0], here[-1][1]
            else:
                here.append((source, size))
                there.append((target, size))
            following = (source.tensor, source.start + size, target.tensor, target.start + size)
        self.here, self.there = Cuts(here), Cuts(there)

    def copy(self, here: Flats, there: Flats) -> None:
        """From here to there, converting dtypes; what is not here counts as zeros."""
        values, targets = self.here.of(here), self.there.of(there)
        if any(here[tensor] is None for tensor in self.here.tensors):
            torch._foreach_zero_([target for value, target in zip(values, targets, strict=True) if value is None])
            targets = [target for value, target in zip(values, targets, strict=True) if value is not None]
            values = [value for value in values if value is not None]
        if values:
            torch._foreach_copy_(targets, values)

    def copy_back(self, there: Flats, here: Flats) -> None:
        """From there to here; all tensors must exist."""
        if self.here.sizes:
            torch._foreach_copy_(self.here.of(here), self.there.of(there))


def one_after_the_other(sizes: Iterable[int], begin: Location = _BEGIN) -> list[Location]:
    """Where stretches of `sizes` begin that lie side by side."""
    tensor, start = begin
    found = []
    for size in sizes:
        found.append(Location(tensor, start))
        start += size
    return found
