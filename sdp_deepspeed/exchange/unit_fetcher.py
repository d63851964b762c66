"""Units from their holders to the ranks that lack them: the dense model's collective, a few units at a time.

It knows pieces only, so that whole tensors and slices travel alike.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.exchange import Exchange, Steps
from sdp_deepspeed.layout.buckets import Bucket, copies
from sdp_deepspeed.layout.fragments import Fragment, PieceByPiece, Views
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.layout.segments import Segment, aligned
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED
from sdp_deepspeed.units import Piece

_MIN_ROUNDS = 2  # so that buffers stay below what is fetched


def in_rounds(exchange: Exchange, buckets: Sequence[Bucket], views: Views, num_rounds: int) -> Steps:
    """Each bucket from its owners to all others, `num_rounds` under way at the same time. Where it yields, once, the
    first run; what comes is written to `views` only after that."""
    running: deque[Steps] = deque()
    coming = iter(buckets)

    def start(number: int) -> None:
        for bucket in itertools.islice(coming, number):
            running.append(exchange.distribute(bucket, views, receivers="others"))
            next(running[-1], None)

    start(num_rounds)
    yield
    while running:
        deque(running.popleft(), maxlen=0)
        start(1)


class UnitFetcher:
    """Every data-parallel rank calls `fetch` for the same sets in the same order.

    Args:
        model: the plan and the module's tensors.
        sets: units (indices in the plan) that are fetched together.
        dp_group: the data-parallel group.
        device: where buffers live.
    """

    def __init__(
        self,
        model: RankModel,
        sets: Sequence[Sequence[int]],
        dp_group: Communicator,
        *,
        device: torch.device,
    ) -> None:
        self._plan = model.plan
        self._views = model.views
        self._nodes = model.nodes
        self._buckets: list[list[Bucket]] = []
        for units in sets:
            first = sum(map(len, self._buckets))
            self._buckets.append([Bucket(first + i, parts) for i, parts in enumerate(self._parts(units))])
        all_buckets = [bucket for buckets in self._buckets for bucket in buckets]
        self._exchange = Exchange(all_buckets, dp_group, self._nodes, device=device, dtype=torch.float32)

    def fetch(
        self,
        index: int,
        held: Callable[[Piece], torch.Tensor],
        targets: Callable[[], Mapping[Piece, torch.Tensor]],
        num_rounds: int = 1,
    ) -> Steps:
        """Fetch what this rank lacks of the units of set `index`. Where it yields, once, the first rounds run.

        Args:
            held: views of the pieces that this rank holds; only those are read.
            targets: makes room, when something has come: per lacking piece where its values go, shaped as in the dense
                model.
            num_rounds: that are under way at the same time; each packs at most half of what a rank holds of the set.
        """
        lacking: Mapping[Piece, torch.Tensor] = {}
        views = PieceByPiece(lambda piece: lacking[piece] if piece in lacking else held(piece))
        rounds = in_rounds(self._exchange, self._buckets[index], views, num_rounds)
        yield next(rounds)
        lacking = targets()
        yield from rounds

    def _parts(self, units: Sequence[int]) -> list[tuple[Segment, ...]]:
        """Segments of one round each, of one dtype, so that a holder never packs more than half of what it holds."""
        by_dtype: dict[torch.dtype, list[list[Segment]]] = {}
        for unit in units:
            for whole in self._segments_of(unit):
                rounds = _MIN_ROUNDS * math.ceil(max(copies(self._nodes, whole.holders, "others").values()))
                by_dtype.setdefault(whole.dtype, []).append(
                    list(whole.split(aligned(-(-whole.num_elements // rounds))))
                )
        return [
            tuple(part for part in parts if part is not None)
            for split in by_dtype.values()
            for parts in itertools.zip_longest(*split)
        ]

    def _segments_of(self, unit: int) -> list[Segment]:
        """The unit's elements, one segment per dtype."""
        by_dtype: dict[torch.dtype, list[Fragment]] = {}
        for piece in self._plan.units[unit].pieces:
            fragment = Fragment(piece, 0, piece.num_elements(self._views.shapes[piece.parameter]))
            by_dtype.setdefault(self._views.tensors[piece.parameter].dtype, []).append(fragment)
        holders = self._plan.ranks_of(unit)
        owners = self._nodes.shard_order(holders)
        return [Segment(NOT_OPTIMIZED, dtype, holders, tuple(parts), owners) for dtype, parts in by_dtype.items()]
