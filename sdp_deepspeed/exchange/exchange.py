"""The collectives of a bucket: gradients to the owners, results back (see README.md beside this file).

Reducing adds up the contributions of each node in fp32 on its carriers, then those of all nodes on the owners, who
divide by the number of holders. Distributing sends what the owners have back: updated weights (stage 1) or averaged
gradients (stage 0). One is the other in reverse, so the same routes serve both. A collective in which no rank has
anything to send is left out, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.routes import Half, Route, Stretch, carried, cut, owned, routes_back
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import Fragment, Views, read, write
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import Segment

_Shares = list[tuple[Stretch, list[Fragment], list[int]]]
"""Stretches with their fragments and the sizes of these."""
Steps = Generator[None, None, None]
"""Where it yields a collective runs, and something else may be done."""


class Exchange:
    """Masked averaging over one process group; every rank calls the same methods in the same bucket order.

    Args:
        buckets: of all ranks' segments, the same on every rank.
        dp_group: the data-parallel group.
        nodes: of its ranks.
        device: where buffers live.
        dtype: of gradients on the wire (DeepSpeed's `communication_data_type`).
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dp_group: Communicator,
        nodes: Nodes,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.buckets = tuple(buckets)
        self._dp_group = dp_group
        self._nodes = nodes
        self.device = device
        self._dtype = dtype
        self._routes: dict[tuple[int, Receivers], tuple[Route, Route]] = {}
        self._owned = {bucket.index: _shares(bucket, owned(bucket, dp_group.rank)) for bucket in buckets}
        self._carried: dict[int, _Shares] = {}

    def held(self, bucket: Bucket) -> list[Fragment]:
        """What this rank holds of the bucket."""
        rank = self._dp_group.rank
        return [fragment for segment in bucket.segments if segment.held_by(rank) for fragment in segment.fragments]

    def held_names(self, bucket: Bucket) -> set[str]:
        """Parameters of which this rank holds pieces in the bucket."""
        return {fragment.piece.parameter for fragment in self.held(bucket)}

    def last_uses(self) -> list[list[str]]:
        """Per bucket the parameters that no later bucket holds pieces of, so that their gradients can be freed."""
        last = {name: bucket.index for bucket in self.buckets for name in sorted(self.held_names(bucket))}
        uses: list[list[str]] = [[] for _ in self.buckets]
        for name, index in last.items():
            uses[index].append(name)
        return uses

    def owned(self, bucket: Bucket) -> list[tuple[Segment, list[Fragment]]]:
        """Segments of which this rank owns a shard that is not empty, with the shard's fragments."""
        return [(bucket.segments[stretch.segment], share) for stretch, share, _ in self._owned[bucket.index]]

    def reduce(
        self,
        bucket: Bucket,
        gradients: Views,
        averages: Sequence[torch.Tensor],
        packed: Callable[[], None] = lambda: None,
    ) -> Steps:
        """Average a bucket's gradients over their holders.

        Args:
            gradients: local gradients; None counts as zeros.
            averages: fp32 outputs, one flat tensor per entry of `owned(bucket)`.
            packed: called as soon as gradients may change.
        """
        between, inside = self._routes_of(bucket, "holders")  # walked backwards: what comes back later leaves now
        shares = self._owned[bucket.index]
        shards = sums = _Sums(shares, averages)
        if between.is_needed:  # else what a rank carries for its node is what it owns
            shares = self._carried_of(bucket)
            sizes = [stretch.num_elements for stretch, *_ in shares]
            sums = _Sums(shares, cut(torch.empty(sum(sizes), dtype=torch.float32, device=self.device), sizes))
        sums.take(gradients, self.device)
        if inside.is_needed:
            leaving = self._packed(inside.received, gradients, self._dtype)
            packed()
            steps = self._travel(leaving, inside.received, inside.sent)
            del leaving
            sums.add(inside.sent, (yield from steps))
        else:
            packed()
        counts = [float(len(bucket.segments[stretch.segment].holders)) for stretch, *_ in shares]
        sums.divide(counts)  # before they are rounded: half precision may not hold the sum of a node
        if between.is_needed:
            leaving = sums.packed(between.received, self._dtype, self.device)
            steps = self._travel(leaving, between.received, between.sent)
            shards.copy_from(sums)
            del sums, leaving
            shards.add(between.sent, (yield from steps))

    def distribute(self, bucket: Bucket, tensors: Views, *, receivers: Receivers = "holders") -> Steps:
        """Send the owners' shards of `tensors` to the receivers, who write them into theirs.

        Args:
            tensors: this rank's own shards are read when it begins, what it passes on to neighbors when that has come;
                what it receives is overwritten.
        """
        for route in self._routes_of(bucket, receivers):
            if route.is_needed:
                sent = self._packed(route.sent, tensors, bucket.segments[0].dtype)
                received = yield from self._travel(sent, route.sent, route.received)
                if route.received.stretches:
                    write(tensors, route.received.fragments, route.received.pieces(received))

    def _travel(self, buffer: torch.Tensor, sent: Half, received: Half) -> Generator[None, None, torch.Tensor]:
        """What arrives. Both buffers live as long as the collective runs."""
        arriving = torch.empty(received.num_elements, dtype=buffer.dtype, device=self.device)
        work = self._dp_group.all_to_all(arriving, buffer, received.splits, sent.splits)
        yield
        work.wait()
        return arriving

    def _packed(self, half: Half, tensors: Views, dtype: torch.dtype) -> torch.Tensor:
        """What is sent, read from `tensors`; what goes to several ranks is read once."""
        buffer = torch.empty(half.num_elements, dtype=dtype, device=self.device)
        if half.stretches:
            torch._foreach_copy_(half.pieces(buffer), read(tensors, half.fragments, device=self.device))
        if half.repeats:
            parts = half.parts(buffer)
            torch._foreach_copy_([parts[i] for i, _ in half.repeats], [parts[i] for _, i in half.repeats])
        return buffer

    def _carried_of(self, bucket: Bucket) -> _Shares:
        if bucket.index not in self._carried:
            self._carried[bucket.index] = _shares(bucket, carried(bucket, self._dp_group.rank, self._nodes))
        return self._carried[bucket.index]

    def _routes_of(self, bucket: Bucket, receivers: Receivers) -> tuple[Route, Route]:
        key = (bucket.index, receivers)
        if key not in self._routes:
            self._routes[key] = routes_back(bucket, self._dp_group.rank, self._nodes, receivers)
        return self._routes[key]


def _shares(bucket: Bucket, stretches: Sequence[Stretch]) -> _Shares:
    shares = []
    for stretch in stretches:
        fragments = list(stretch.fragments(bucket.segments))
        shares.append((stretch, fragments, [fragment.num_elements for fragment in fragments]))
    return shares


class _Sums:
    """fp32 sums of stretches, at most one of each segment; averages in the end.

    Args:
        shares: the stretches.
        totals: flat, one per stretch.
    """

    def __init__(self, shares: _Shares, totals: Sequence[torch.Tensor]) -> None:
        self._shares = shares
        self._totals = totals
        self._by_segment = {
            stretch.segment: (stretch, total) for (stretch, _, _), total in zip(shares, totals, strict=True)
        }

    def take(self, gradients: Views, device: torch.device) -> None:
        """This rank's own contribution, with which they begin."""
        fragments = [fragment for _, share, _ in self._shares for fragment in share]
        if fragments:
            pieces = [
                piece
                for (*_, sizes), total in zip(self._shares, self._totals, strict=True)
                for piece in cut(total, sizes)
            ]
            torch._foreach_copy_(pieces, read(gradients, fragments, device=device))

    def add(self, half: Half, received: torch.Tensor) -> None:
        """Contributions of all peers, one after the other; in fp32 before they are added, since mixed dtypes are a
        launch per tensor."""
        for start, stretches, sizes in half.from_peers:
            contribution = received.narrow(0, start, sum(sizes)).float()
            torch._foreach_add_([self._part(stretch) for stretch in stretches], cut(contribution, sizes))

    def divide(self, counts: Sequence[float]) -> None:
        if counts:
            torch._foreach_div_(list(self._totals), list(counts))

    def packed(self, half: Half, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Parts of them, in the order of a buffer."""
        buffer = torch.empty(half.num_elements, dtype=dtype, device=device)
        if half.stretches:
            torch._foreach_copy_(half.parts(buffer), [self._part(stretch) for stretch in half.stretches])
        return buffer

    def copy_from(self, others: _Sums) -> None:
        """Values of sums that have all of these in them."""
        if self._totals:
            torch._foreach_copy_(list(self._totals), [others._part(stretch) for stretch, *_ in self._shares])

    def _part(self, stretch: Stretch) -> torch.Tensor:
        whole, total = self._by_segment[stretch.segment]
        if stretch == whole:
            return total
        return total.narrow(0, stretch.start - whole.start, stretch.num_elements)
