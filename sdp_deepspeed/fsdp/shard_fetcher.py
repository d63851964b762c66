"""Units from the holders' shards to the ranks that lack them: the dense model's collective, over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.exchange import Exchange, Steps, in_rounds
from sdp_deepspeed.fsdp.pieces import elements_of, shards
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.cuts import Location
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.layout.segments import Segment
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED
from sdp_deepspeed.units import Piece

_SHARE = 2  # of a unit's elements, the part that a rank sends at most in one round: 1 / _SHARE


class _ShardViews:
    """Shards of held pieces, and whole tensors for lacking ones, as the exchange reads and writes them.

    Args:
        offsets: elements of the dense tensors that this rank's shards of held pieces begin at.
        read: what this rank has of a held piece.

    Attributes:
        targets: where lacking pieces go.
    """

    def __init__(self, offsets: Mapping[Piece, int], read: Callable[[Piece], torch.Tensor]) -> None:
        self._offsets, self._read = offsets, read
        self.targets: Mapping[Piece, torch.Tensor] = {}

    def locate(self, piece: Piece) -> Location:
        return Location(piece, -self._offsets.get(piece, 0))

    def tensor(self, key: Any) -> torch.Tensor:
        return self.targets[key] if key in self.targets else self._read(key)


class ShardFetcher:
    """Every rank calls `fetch` for the same sets in the same order. Of whole pieces only (block units).

    Args:
        model: the plan, and the dense shapes.
        sets: units (indices in the plan) that are fetched together.
        dp_group: all ranks.
        read: this rank's shard of a held piece, in the module now (of a buffer, all of it); on `device`.
        device: where buffers live.
    """

    def __init__(
        self,
        model: RankModel,
        sets: Sequence[Sequence[int]],
        dp_group: Communicator,
        read: Callable[[Piece], torch.Tensor],
        *,
        device: torch.device,
    ) -> None:
        self._model, self._read = model, read
        self._units = [unit for units in sets for unit in units]
        self._shapes = model.views.shapes
        self._dtypes = {name: tensor.dtype for name, tensor in model.views.tensors.items()}
        self._offsets: dict[Piece, int] = {}
        self._buckets: list[list[Bucket]] = []
        for units in sets:
            first = sum(map(len, self._buckets))
            self._buckets.append([Bucket(first + number, part) for number, part in enumerate(self._rounds(units))])
        every = [bucket for buckets in self._buckets for bucket in buckets]
        # A holder has its own shard only, and nothing to hand on to its neighbors: all ranks as on one node.
        self._exchange = Exchange(every, dp_group, Nodes.one(dp_group.size), device=device)

    def fetch(self, index: int, targets: Callable[[], Mapping[Piece, torch.Tensor]], num_rounds: int = 1) -> Steps:
        """Fetch what this rank lacks of the units of set `index`. Where it yields, once, the first rounds run.

        Args:
            targets: makes room: per lacking piece where its values go, shaped as in the dense model.
            num_rounds: that are under way at the same time.
        """
        views = _ShardViews(self._offsets, self._read)
        rounds = in_rounds(self._exchange, self._buckets[index], views, num_rounds)
        yield next(rounds)
        views.targets = targets()
        yield from rounds

    def held(self) -> Iterator[torch.Tensor]:
        """All that others get from this rank."""
        for index in self._units:
            if self._model.holds(index):
                yield from map(self._read, self._model.plan.units[index].pieces)

    def _rounds(self, units: Sequence[int]) -> Iterator[tuple[Segment, ...]]:
        """Segments of one round each, of one dtype."""
        by_dtype: dict[torch.dtype, list[Segment]] = {}
        for unit in units:
            for segment in self._segments_of(unit):
                by_dtype.setdefault(segment.dtype, []).append(segment)
        size = len(self._model.plan.subnetwork_of_rank)
        for segments in by_dtype.values():
            most = max((size - len(s.holders)) / len(s.holders) for s in segments)  # copies of a unit, in parts
            count = max(1, math.ceil(_SHARE * most))
            split = [list(s.split(-(-s.num_elements // count))) for s in segments]
            yield from (tuple(s[number] for s in split if number < len(s)) for number in range(count))

    def _segments_of(self, unit: int) -> Iterator[Segment]:
        """One for each dtype and holder, who alone has these elements."""
        holders, rank = self._model.plan.ranks_of(unit), self._model.rank
        parts: dict[tuple[torch.dtype, int], list[Fragment]] = {}
        for piece in self._model.plan.units[unit].pieces:
            shape, dtype = self._shapes[piece.parameter], self._dtypes[piece.parameter]
            if piece.kind == "buffer":
                parts.setdefault((dtype, holders[0]), []).append(Fragment(piece, 0, math.prod(shape)))
                self._offsets[piece] = 0
                continue
            if rank in holders:
                self._offsets[piece], _ = elements_of(holders.index(rank), len(holders), shape)
            for owner, start, stop in shards(holders, shape):
                parts.setdefault((dtype, owner), []).append(Fragment(piece, start, stop))
        for (dtype, owner), fragments in parts.items():
            yield Segment(NOT_OPTIMIZED, dtype, holders, tuple(fragments), sole_owner=owner)
