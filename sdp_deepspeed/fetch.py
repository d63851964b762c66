"""Units from their holders to the ranks that lack them: the dense model's collective, one unit at a time.

It knows pieces only, so that whole tensors and slices travel alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .communicator import Communicator
from .exchange import Exchange
from .plan import Plan
from .segments import NOT_OPTIMIZED, Bucket, Fragment, Segment
from .units import Piece


class UnitFetcher:
    """Every data-parallel rank calls `fetch` for the same units in the same order.

    Args:
        shape_of: dense shape of a piece's tensor.
        dtype_of: dtype of a piece's tensor.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        *,
        shape_of: Callable[[Piece], tuple[int, ...]],
        dtype_of: Callable[[Piece], torch.dtype],
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._rank = communicator.rank
        self._size = communicator.size
        self._device = device
        self._shape_of = shape_of
        self._dtype_of = dtype_of
        self._buckets: list[list[list[Bucket]]] = []
        for index in range(len(plan.units)):
            first = sum(len(buckets) for unit in self._buckets for buckets in unit)
            self._buckets.append(self._buckets_of(index, first))
        every = [bucket for unit in self._buckets for buckets in unit for bucket in buckets]
        self._exchange = Exchange(every, communicator, device=device, dtype=torch.float32)

    def fetch(self, unit: int, tensors: Mapping[str, torch.Tensor]) -> dict[Piece, torch.Tensor]:
        """Flat values of the unit's pieces, views of one buffer per dtype; nothing on ranks that hold the unit.

        Args:
            unit: index in the plan.
            tensors: dense tensors by name, read on the unit's holders only.
        """
        values: dict[Piece, torch.Tensor] = {}
        held = self._plan.holds_rank(unit, self._rank)
        for buckets in self._buckets[unit]:
            lengths = [0 if held else bucket.segments[0].num_elements for bucket in buckets]
            flat = torch.empty(sum(lengths), dtype=buckets[0].segments[0].dtype, device=self._device)
            for bucket, out in zip(buckets, flat.split(lengths), strict=True):
                self._exchange.collect(bucket, tensors, receivers="others", out=out)
            if not held:
                sizes = _sizes(buckets)
                values |= zip(sizes, flat.split(list(sizes.values())), strict=True)
        return values

    def _buckets_of(self, unit: int, first: int) -> list[list[Bucket]]:
        """Per dtype its buckets: one segment each, cut so that a holder never packs more than the unit's size."""
        holders = self._plan.ranks_of(unit)
        rounds = max(1, -(-(self._size - len(holders)) // len(holders)))
        by_dtype: dict[torch.dtype, list[Fragment]] = {}
        for piece in self._plan.units[unit].pieces:
            fragment = Fragment(piece, 0, piece.num_elements(self._shape_of(piece)))
            by_dtype.setdefault(self._dtype_of(piece), []).append(fragment)
        result: list[list[Bucket]] = []
        for dtype, fragments in by_dtype.items():
            whole = Segment(NOT_OPTIMIZED, dtype, holders, tuple(fragments))
            start = first + sum(map(len, result))
            parts = whole.split(-(-whole.num_elements // rounds))
            result.append([Bucket(start + position, (part,)) for position, part in enumerate(parts)])
        return result


def _sizes(buckets: list[Bucket]) -> dict[Piece, int]:
    """Elements of each piece, in the order in which the buckets carry them."""
    sizes: dict[Piece, int] = {}
    for bucket in buckets:
        for fragment in bucket.segments[0].fragments:
            sizes[fragment.piece] = sizes.get(fragment.piece, 0) + fragment.stop - fragment.start
    return sizes
