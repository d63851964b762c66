"""Parts of the dense model from the holders' shards: whole units to the ranks that lack them, and pieces to all, since
nobody has all of a piece."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.fsdp.shard_fetcher import ShardFetcher
from sdp_deepspeed.fsdp.shard_regions import ShardRegion
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.layout.segments import Segment
from sdp_deepspeed.masking.part import MaskedPart
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED
from sdp_deepspeed.units import Piece

_SHARE = 2  # of a part's elements, what a rank sends at most in one round: 1 / _SHARE


class PartFetcher(ShardFetcher):
    """A fetcher of parts of both kinds.

    Args:
        model: the plan, and the dense shapes.
        parts: of the mask, in order.
        dp_group: all ranks.
        read: this rank's shard of a held whole piece.
        device: where buffers live.
    """

    def __init__(
        self,
        model: RankModel,
        parts: Sequence[MaskedPart],
        dp_group: Communicator,
        read: Callable[[Piece], torch.Tensor],
        *,
        device: torch.device,
    ) -> None:
        self._rank = dp_group.rank
        self._split = {part.units[0]: part for part in parts if isinstance(part, SplitBranch)}
        self._regions = {
            region.piece: (part, region) for part in self._split.values() for region in part.values.regions
        }

        def read_piece(piece: Piece) -> torch.Tensor:
            if piece not in self._regions:
                return read(piece)
            part, region = self._regions[piece]
            return part.values.read(region).to(device)

        sets = [part.units[:1] if isinstance(part, SplitBranch) else part.units for part in parts]
        super().__init__(model, sets, dp_group, read_piece, device=device)

    def held(self) -> Iterator[torch.Tensor]:
        whole = [index for index in self._units if index not in self._split]
        for index in whole:
            if self._model.holds(index):
                yield from map(self._read, self._model.plan.units[index].pieces)
        for part, region in self._regions.values():
            if region.owner == self._rank:
                yield part.values.read(region)

    def _rounds(self, units: Sequence[int]) -> Iterator[tuple[Segment, ...]]:
        if units[0] not in self._split:
            yield from super()._rounds(units)
            return
        part = self._split[units[0]]
        by_dtype: dict[torch.dtype, list[ShardRegion]] = {}
        for region in part.values.regions:
            by_dtype.setdefault(part.values.dtypes[region.dense_name], []).append(region)
        for dtype, regions in by_dtype.items():
            yield from self._rounds_of(dtype, regions)

    def _rounds_of(self, dtype: torch.dtype, regions: Sequence[ShardRegion]) -> Iterator[tuple[Segment, ...]]:
        """A segment for each owner, who alone has it: all others receive it."""
        owned: defaultdict[int, list[Fragment]] = defaultdict(list)
        for region in regions:
            owned[region.owner].append(Fragment(region.piece, 0, region.num_elements))
        segments = [
            Segment(NOT_OPTIMIZED, dtype, (owner,), tuple(fragments), sole_owner=owner)
            for owner, fragments in sorted(owned.items())
        ]
        size = len(self._model.plan.subnetwork_of_rank)
        sent = max(segment.num_elements for segment in segments) * (size - 1)
        count = max(1, math.ceil(_SHARE * sent / sum(segment.num_elements for segment in segments)))
        split = [list(segment.split(-(-segment.num_elements // count))) for segment in segments]
        yield from (tuple(parts[number] for parts in split if number < len(parts)) for number in range(count))
