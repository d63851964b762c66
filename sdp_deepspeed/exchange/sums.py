"""What a rank adds up of a bucket, for its node or as an owner: how contributions come in, and where results go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from sdp_deepspeed.exchange.routes import Half, Route, Stretch, carried, owned, transfer
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.cuts import Cuts, Location, Moves, one_after_the_other
from sdp_deepspeed.layout.fragments import Views
from sdp_deepspeed.layout.nodes import Nodes


class Sums:
    """fp32 sums of stretches, at most one of each segment; averages in the end. Made once for a bucket.

    Its flat tensors are handed in: one that has all stretches, one after the other, or one for each.

    Args:
        stretches: in the order of the flat tensors.
        in_one: whether they lie in one flat tensor.
        contributions: of peers, as they are received.
    """

    def __init__(self, bucket: Bucket, stretches: Sequence[Stretch], *, in_one: bool, contributions: Half) -> None:
        self.stretches = stretches
        self.num_elements = sum(stretch.num_elements for stretch in stretches)
        sizes = [stretch.num_elements for stretch in stretches]
        starts = one_after_the_other(sizes) if in_one else [Location(index, 0) for index in range(len(sizes))]
        self._starts = {stretch.segment: (stretch, start) for stretch, start in zip(stretches, starts, strict=True)}
        self._transfer = transfer(bucket, self._starts.values())
        self._rounds = [Moves(moves) for moves in self._in_rounds(contributions)]
        self._equal_parts, self._counts = self._divisors(bucket)

    def location(self, stretch: Stretch) -> Location:
        """Of a stretch that is part of one of theirs."""
        whole, (tensor, start) = self._starts[stretch.segment]
        return Location(tensor, start + stretch.start - whole.start)

    def _in_rounds(self, contributions: Half) -> Iterable[list[tuple[Location, Location, int]]]:
        """What can be added at the same time, since it goes to different elements; for each element those of peers in
        their order, so that sums do not depend on the rounds."""
        rounds: defaultdict[int, list[tuple[Location, Location, int]]] = defaultdict(list)
        earlier: defaultdict[int, list[tuple[int, Stretch]]] = defaultdict(list)
        for stretch, here in zip(contributions.stretches, contributions.locations, strict=True):
            before = earlier[stretch.segment]
            number = max([n for n, other in before if other.overlaps(stretch)], default=-1) + 1
            before.append((number, stretch))
            rounds[number].append((here, self.location(stretch), stretch.num_elements))
        return rounds.values()

    def _divisors(self, bucket: Bucket) -> tuple[Cuts, list[float]]:
        """Neighbors with the same number of holders are one."""
        parts: list[tuple[Location, int]] = []
        counts: list[float] = []
        for stretch, start in self._starts.values():
            count = float(len(bucket.segments[stretch.segment].holders))
            if counts and counts[-1] == count and parts[-1][0].tensor == start.tensor:
                parts[-1] = parts[-1][0], parts[-1][1] + stretch.num_elements
            else:
                parts.append((start, stretch.num_elements))
                counts.append(count)
        return Cuts(parts), counts

    def to_buffer(self, half: Half) -> Moves:
        """Parts of them that are sent."""
        return Moves(
            (self.location(stretch), there, stretch.num_elements)
            for stretch, there in zip(half.stretches, half.locations, strict=True)
        )

    def to_parts(self, others: Sums) -> Moves:
        """Sums of which these have all elements."""
        return Moves((self.location(s), others.location(s), s.num_elements) for s in others.stretches)

    def take(self, gradients: Views, flats: Sequence[torch.Tensor]) -> None:
        """This rank's own contribution, with which they begin."""
        self._transfer.gather(gradients, flats)

    def write(self, flats: Sequence[torch.Tensor], tensors: Views) -> None:
        """Into this rank's tensors, which must exist."""
        self._transfer.scatter(flats, tensors)

    def add(self, received: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        """Contributions of all peers; in fp32 before they are added, since mixed dtypes are a launch per tensor."""
        for moves in self._rounds:
            torch._foreach_add_(moves.there.of(flats), _in_fp32(moves.here.of([received]), moves.here.sizes))

    def divide(self, flats: Sequence[torch.Tensor]) -> None:
        """By the numbers of holders."""
        if self._counts:
            torch._foreach_div_(self._equal_parts.of(flats), self._counts)


class BucketSums:
    """What one rank adds up of one bucket, first for its node, then as an owner; the same where nothing crosses nodes.

    Args:
        routes: back to the holders, between nodes and inside them.
    """

    def __init__(self, bucket: Bucket, rank: int, nodes: Nodes, routes: tuple[Route, Route]) -> None:
        between, inside = routes
        contributions = between.sent if between.is_needed else inside.sent
        self.shards = self.carried = Sums(bucket, owned(bucket, rank), in_one=False, contributions=contributions)
        if between.is_needed:
            self.carried = Sums(bucket, carried(bucket, rank, nodes), in_one=True, contributions=inside.sent)
            self.leaving = self.carried.to_buffer(between.received)
            self.kept = self.carried.to_parts(self.shards)


def _in_fp32(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    if parts[0].dtype == torch.float32:
        return parts
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=parts[0].device)
    converted = list(flat.split_with_sizes(sizes))
    torch._foreach_copy_(converted, parts)
    return converted
