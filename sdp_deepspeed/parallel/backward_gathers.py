"""Backward regime: all-gather updated weights over all ranks, once per depth range and dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sdp_deepspeed.parallel import groups
from sdp_deepspeed.parallel.buckets import Bucket
from sdp_deepspeed.parallel.groups import RankGroup
from sdp_deepspeed.units import Piece


class Span(NamedTuple):
    """Consecutive shards of a bucket at the same offset in the messages of consecutive ranks, which one copy stores.

    Args:
        position: position of the first shard in the bucket.
        rank: the first rank.
        length: number of ranks.
        start: offset of the shard in the message of its rank.
    """

    position: int
    rank: int
    length: int
    start: int


@dataclass(frozen=True)
class GatheredRange:
    """Buckets whose weights are gathered together. Each rank sends its shards, padded to the largest count.

    Args:
        spans: spans of each bucket.
        starts: offset of this rank's shard of each bucket in its message.
        size: number of elements that each rank sends.
    """

    buckets: Sequence[Bucket]
    spans: Sequence[Sequence[Span]]
    starts: Sequence[int]
    size: int

    def all_gather(self, group: RankGroup, view: Callable[[Piece], torch.Tensor], *, reuse_gradients: bool) -> None:
        """All-gather the shards, and store them in the module's tensors; a collective of the data-parallel ranks.

        Args:
            group: all data-parallel ranks.
            view: `Mask.view`.
            reuse_gradients: see `Bucket.allocate_weights`.
        """
        first = self.buckets[0]
        received = torch.empty(group.size * self.size, dtype=first.layout.dtype, device=first.device)
        by_rank = received.view(group.size, -1)
        for bucket, start in zip(self.buckets, self.starts, strict=True):
            if group.position in bucket.layout.owners:
                bucket.allocate_weights(reuse_gradients=reuse_gradients)
                bucket.shard_to_weights()
                assert bucket.weights is not None
                shard = bucket.shard_of(bucket.weights)
                by_rank[group.position, start : start + shard.numel()].copy_(shard)
        groups.all_gather([received], [by_rank[group.position]], [group])
        for bucket, spans in zip(self.buckets, self.spans, strict=True):
            bucket.allocate_weights(reuse_gradients=reuse_gradients)
            assert bucket.weights is not None
            shards = bucket.weights.view(len(bucket.layout.owners), -1)
            for position, rank, length, start in spans:
                values = by_rank[rank : rank + length, start : start + shards.shape[1]]
                shards[position : position + length].copy_(values)
            bucket.weights_to_module(view)
            bucket.drop_weights()


def plan_gathers(buckets: Sequence[Bucket], num_ranks: int, rank: int) -> list[GatheredRange]:
    """The all-gathers, in the same order on all ranks.

    Args:
        buckets: those that some rank lacks, at least in part, after a step.
        num_ranks, rank: data-parallel size and index.
    """
    ranges: defaultdict[tuple[int, torch.dtype], list[Bucket]] = defaultdict(list)
    for bucket in buckets:
        ranges[bucket.layout.depth_range, bucket.layout.dtype].append(bucket)
    return [_plan_range(members, num_ranks, rank) for members in ranges.values()]


def _plan_range(buckets: Sequence[Bucket], num_ranks: int, rank: int) -> GatheredRange:
    counts = [0] * num_ranks  # elements of each rank's message so far
    spans_of_buckets, starts = [], []
    for bucket in buckets:
        layout = bucket.layout
        starts.append(counts[rank])
        spans: list[Span] = []
        for position, owner in enumerate(layout.owners):
            last = spans[-1] if spans else None
            if last is not None and last.rank + last.length == owner and last.start == counts[owner]:
                spans[-1] = last._replace(length=last.length + 1)
            else:
                spans.append(Span(position, owner, 1, counts[owner]))
            counts[owner] += layout.size // len(layout.owners)
        spans_of_buckets.append(spans)
    return GatheredRange(buckets, spans_of_buckets, starts, max(counts))
