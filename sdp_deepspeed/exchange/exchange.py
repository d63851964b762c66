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
from sdp_deepspeed.exchange.buffers import Buffers
from sdp_deepspeed.exchange.routes import Half, Route, Stretch, owned, routes_back
from sdp_deepspeed.exchange.sums import BucketSums
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import Fragment, Views
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import Segment

Steps = Generator[None, None, None]
"""Where it yields a collective runs, and something else may be done; what comes after may be on another stream."""


class Exchange:
    """Masked averaging over one process group; every rank calls the same methods in the same bucket order.

    Args:
        buckets: of all ranks' segments, the same on every rank.
        dp_group: the data-parallel group.
        nodes: of its ranks.
        device: of the tensors.
        dtype: of gradients on the wire (DeepSpeed's `communication_data_type`).
        buffers: what travels lies there; None if nothing is kept between two collectives.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        dp_group: Communicator,
        nodes: Nodes,
        *,
        device: torch.device,
        dtype: torch.dtype,
        buffers: Buffers | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self.buffers = buffers or Buffers(device, is_kept=False)
        self._dp_group = dp_group
        self._nodes = nodes
        self.device = device
        self._dtype = dtype
        self._routes: dict[tuple[int, Receivers], tuple[Route, Route]] = {}
        self._sums: dict[int, BucketSums] = {}
        self._owned = {bucket.index: _with_fragments(bucket, owned(bucket, dp_group.rank)) for bucket in buckets}

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
        return self._owned[bucket.index]

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
        sums, flats = self._sums_of(bucket), averages
        if between.is_needed:  # else what a rank carries for its node is what it owns
            for_node = self.buffers.take(sums.carried.num_elements, torch.float32)
            flats = [for_node]
        sums.carried.take(gradients, flats)
        if inside.is_needed:
            leaving = self._packed(inside.received, gradients, self._dtype)
            packed()
            arrived = yield from self._travel(leaving, inside.received, inside.sent)
            sums.carried.add(arrived, flats)
            self.buffers.give(arrived)
        else:
            packed()
        sums.carried.divide(flats)  # before they are rounded: half precision may not hold the sum of a node
        if between.is_needed:
            leaving = self.buffers.take(between.received.num_elements, self._dtype)
            sums.leaving.copy(flats, [leaving])
            sums.kept.copy(flats, averages)
            self.buffers.give(for_node)
            arrived = yield from self._travel(leaving, between.received, between.sent)
            sums.shards.add(arrived, averages)
            self.buffers.give(arrived)

    def keep(self, bucket: Bucket, averages: Sequence[torch.Tensor], tensors: Views) -> None:
        """Write averages of what this rank owns into its own tensors."""
        self._sums_of(bucket).shards.write(averages, tensors)

    def distribute(self, bucket: Bucket, tensors: Views, *, receivers: Receivers = "holders") -> Steps:
        """Send the owners' shards of `tensors` to the receivers, who write them into theirs.

        Args:
            tensors: this rank's own shards are read when it begins, what it passes on to neighbors when that has come;
                what it receives is overwritten.
        """
        for route in self._routes_of(bucket, receivers):
            if route.is_needed:
                leaving = self._packed(route.sent, tensors, bucket.segments[0].dtype)
                arrived = yield from self._travel(leaving, route.sent, route.received)
                route.received.transfer.scatter([arrived], tensors)
                self.buffers.give(arrived)

    def _travel(self, leaving: torch.Tensor, sent: Half, received: Half) -> Generator[None, None, torch.Tensor]:
        """What arrives; `leaving` is given back once the collective is over."""
        arriving = self.buffers.take(received.num_elements, leaving.dtype)
        work = self._dp_group.all_to_all(arriving, leaving, received.splits, sent.splits)
        yield
        work.wait()
        self.buffers.give(leaving)
        return arriving

    def _packed(self, half: Half, tensors: Views, dtype: torch.dtype) -> torch.Tensor:
        """What is sent, read from `tensors`; what goes to several ranks is read once."""
        buffer = self.buffers.take(half.num_elements, dtype)
        half.transfer.gather(tensors, [buffer])
        half.repeats.copy([buffer], [buffer])
        return buffer

    def _sums_of(self, bucket: Bucket) -> BucketSums:
        if bucket.index not in self._sums:
            routes = self._routes_of(bucket, "holders")
            self._sums[bucket.index] = BucketSums(bucket, self._dp_group.rank, self._nodes, routes)
        return self._sums[bucket.index]

    def _routes_of(self, bucket: Bucket, receivers: Receivers) -> tuple[Route, Route]:
        key = (bucket.index, receivers)
        if key not in self._routes:
            self._routes[key] = routes_back(bucket, self._dp_group.rank, self._nodes, receivers)
        return self._routes[key]


def _with_fragments(bucket: Bucket, stretches: Sequence[Stretch]) -> list[tuple[Segment, list[Fragment]]]:
    """Segments of a bucket, and of what stretches of them consist."""
    return [(bucket.segments[stretch.segment], list(stretch.fragments(bucket.segments))) for stretch in stretches]
