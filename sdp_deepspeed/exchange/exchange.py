"""The two collectives per bucket: gradients to the owners, results back (see README.md beside this file).

Reducing sends each held shard to its owner, who adds the holders' contributions in fp32 and divides by
their number. Distributing sends what the owner has back: updated weights (stage 1) or averaged
gradients (stage 0). One reads what the other writes, so one route serves both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.distributed.communicator import Communicator, Done, Work
from sdp_deepspeed.exchange.routes import Receivers, Route, return_route
from sdp_deepspeed.layout.fragments import Fragment, Views, read, write
from sdp_deepspeed.layout.segments import Bucket, Segment


@dataclass
class Reduction:
    """A bucket on its way to the owners.

    Args:
        averages: fp32, one flat tensor per entry of `Exchange.owned(bucket)`; this rank's own contribution until then.
        buffers: what is sent and what is received; empty once the reduction is finished.
        work: keeps the buffers too.
    """

    bucket: Bucket
    averages: list[torch.Tensor]
    buffers: list[torch.Tensor]
    work: Work


@dataclass(frozen=True)
class Distribution:
    """A bucket on its way back; the buffers live until it is finished."""

    route: Route
    tensors: Views
    sent: torch.Tensor
    received: torch.Tensor
    work: Work


class Exchange:
    """Masked averaging over one process group; every rank calls the same methods in the same bucket order.

    Args:
        buckets: of all ranks' segments, the same on every rank.
        dp_group: the data-parallel group.
        device: where buffers live.
        dtype: of gradients on the wire (DeepSpeed's `communication_data_type`).
    """

    def __init__(
        self, buckets: Sequence[Bucket], dp_group: Communicator, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.buckets = tuple(buckets)
        self._dp_group = dp_group
        self.device = device
        self._dtype = dtype
        self._routes: dict[tuple[int, Receivers], Route] = {}
        self._owned = {bucket.index: self._owned_shards(bucket) for bucket in buckets}

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

    def _owned_shards(self, bucket: Bucket) -> list[tuple[Segment, list[Fragment]]]:
        rank = self._dp_group.rank
        shards = [(segment, list(segment.cut(*segment.owned_range(rank)))) for segment in bucket.segments]
        return [(segment, fragments) for segment, fragments in shards if fragments]

    def start_reduce(
        self, bucket: Bucket, gradients: Views, averages: Sequence[torch.Tensor] | None = None
    ) -> Reduction:
        """Send this rank's contributions to a bucket.

        Args:
            gradients: local gradients; None counts as zeros. They may change as soon as this returns.
            averages: fp32 outputs, one flat tensor per entry of `owned(bucket)`; None makes new ones.
        """
        route = self._route(bucket, "holders")  # walked backwards: what comes back later is what leaves now
        sent = torch.empty(sum(route.received_splits), dtype=self._dtype, device=self.device)
        if route.received:
            torch._foreach_copy_(
                list(sent.split(route.received_sizes)), read(gradients, route.received, device=self.device)
            )
        received = torch.empty(sum(route.sent_splits), dtype=self._dtype, device=self.device)
        work = self._dp_group.all_to_all(received, sent, route.sent_splits, route.received_splits)
        contributions = []
        for index, (_, fragments) in enumerate(self.owned(bucket)):
            sizes = [fragment.num_elements for fragment in fragments]
            contributions.append(torch.empty(sum(sizes), device=self.device) if averages is None else averages[index])
            torch._foreach_copy_(list(contributions[-1].split(sizes)), read(gradients, fragments, device=self.device))
        return Reduction(bucket, contributions, [sent, received], work)

    def finish_reduce(self, reduction: Reduction) -> None:
        """Wait for the others' contributions and average them with this rank's, in `reduction.averages`."""
        reduction.work.wait()
        reduction.work = Done()
        _, received = reduction.buffers
        reduction.buffers.clear()
        bucket, averages = reduction.bucket, reduction.averages
        owned = self.owned(bucket)
        position = 0
        for peer in range(self._dp_group.size):
            if peer == self._dp_group.rank:
                continue
            sums = [average for (segment, _), average in zip(owned, averages, strict=True) if segment.held_by(peer)]
            if sums:
                lengths = [average.numel() for average in sums]
                stretch = received.narrow(0, position, sum(lengths))
                torch._foreach_add_(sums, list(stretch.split(lengths)))
                position += sum(lengths)
        if owned:
            torch._foreach_div_(averages, [float(len(segment.holders)) for segment, _ in owned])

    def distribute(self, bucket: Bucket, tensors: Views, *, receivers: Receivers = "holders") -> None:
        """Send the owners' shards of `tensors` to the receivers, who write them into theirs.

        Args:
            tensors: this rank's own shards are read, what it receives is overwritten.
        """
        self.finish_distribute(self.start_distribute(bucket, tensors, receivers=receivers))

    def start_distribute(self, bucket: Bucket, tensors: Views, *, receivers: Receivers = "holders") -> Distribution:
        """The first part of `distribute`: own shards are read before it returns."""
        route = self._route(bucket, receivers)
        dtype = bucket.segments[0].dtype
        sent = torch.empty(sum(route.sent_splits), dtype=dtype, device=self.device)
        if route.sent:
            torch._foreach_copy_(list(sent.split(route.sent_sizes)), read(tensors, route.sent))
        received = torch.empty(sum(route.received_splits), dtype=dtype, device=self.device)
        work = self._dp_group.all_to_all(received, sent, route.received_splits, route.sent_splits)
        return Distribution(route, tensors, sent, received, work)

    def finish_distribute(self, running: Distribution) -> None:
        """Wait for what the owners sent and write it."""
        running.work.wait()
        if running.route.received:
            write(running.tensors, running.route.received, running.received.split(running.route.received_sizes))

    def _route(self, bucket: Bucket, receivers: Receivers) -> Route:
        key = (bucket.index, receivers)
        if key not in self._routes:
            self._routes[key] = return_route(bucket, self._dp_group.rank, self._dp_group.size, receivers)
        return self._routes[key]
