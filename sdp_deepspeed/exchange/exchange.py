"""The two collectives per bucket: gradients to the owners, results back (DESIGN.md section 4).

`reduce` sends each held shard to its owner, who adds the holders' contributions in fp32 and divides by
their number. `distribute` sends what the owner has back: updated weights (stage 1) or averaged
gradients (stage 0). One reads what the other writes, so one route serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from sdp_deepspeed.distributed.communicator import Communicator, Done, Work
from sdp_deepspeed.layout.places import in_order
from sdp_deepspeed.layout.segments import Bucket, Fragment, Segment
from sdp_deepspeed.units import Piece

Receivers = Literal["holders", "others", "all"]
Views = Callable[[Piece], torch.Tensor | None]
"""From a piece to its view in this rank's tensors, shaped as in the dense model; None where there is no tensor."""


def read(views: Views, fragments: Sequence[Fragment], *, device: torch.device | None = None) -> list[torch.Tensor]:
    """Flat views (copies where a piece is not contiguous) of `fragments`; a missing piece reads as zeros."""
    flats: dict[Piece, torch.Tensor | None] = {}
    zero = torch.zeros(1, device=device)
    values = []
    for fragment in fragments:
        piece = fragment.piece
        if piece not in flats:
            view = views(piece)
            flats[piece] = None if view is None else in_order(piece, view).reshape(-1)
        flat = flats[piece]
        length = fragment.stop - fragment.start
        values.append(zero.expand(length) if flat is None else flat.narrow(0, fragment.start, length))
    return values


def write(views: Views, fragments: Sequence[Fragment], values: Sequence[torch.Tensor]) -> None:
    """Copy flat `values` into `fragments`, converting the dtype; all pieces must exist."""
    targets: list[torch.Tensor] = []
    scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
    flats: dict[Piece, torch.Tensor] = {}
    for fragment in fragments:
        piece = fragment.piece
        if piece not in flats:
            stored = views(piece)
            assert stored is not None, f"no tensor to write {piece.parameter} to"
            view = in_order(piece, stored)
            flats[piece] = view.reshape(-1)
            if not view.is_contiguous():
                scattered.append((view, flats[piece]))
        targets.append(flats[piece].narrow(0, fragment.start, fragment.stop - fragment.start))
    if targets:
        torch._foreach_copy_(targets, list(values))
    for view, flat in scattered:
        view.copy_(flat.view(view.shape))


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives in one collective, in buffer order (peer by peer).

    Args:
        sent, received: fragments in the order of the buffer.
        sent_splits, received_splits: elements per peer.
    """

    sent: tuple[Fragment, ...]
    sent_splits: tuple[int, ...]
    received: tuple[Fragment, ...]
    received_splits: tuple[int, ...]

    @cached_property
    def sent_sizes(self) -> list[int]:
        return [fragment.stop - fragment.start for fragment in self.sent]

    @cached_property
    def received_sizes(self) -> list[int]:
        return [fragment.stop - fragment.start for fragment in self.received]


def receives(segment: Segment, rank: int, receivers: Receivers) -> bool:
    """Whether `rank` is among the receivers of what the owners of `segment` send back."""
    if receivers == "all":
        return True
    return segment.held_by(rank) == (receivers == "holders")


def back_route(bucket: Bucket, rank: int, size: int, receivers: Receivers) -> Route:
    """The returning half for `rank`: its own shards to the receivers, theirs to it. Nobody sends to itself."""
    sent: list[Fragment] = []
    received: list[Fragment] = []
    sent_splits, received_splits = [0] * size, [0] * size
    for peer in range(size):
        if peer == rank:
            continue
        for segment in bucket.segments:
            if segment.held_by(rank) and receives(segment, peer, receivers):
                start, stop = segment.shard(rank)
                sent.extend(segment.cut(start, stop))
                sent_splits[peer] += stop - start
            if segment.held_by(peer) and receives(segment, rank, receivers):
                start, stop = segment.shard(peer)
                received.extend(segment.cut(start, stop))
                received_splits[peer] += stop - start
    return Route(tuple(sent), tuple(sent_splits), tuple(received), tuple(received_splits))


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
    """Masked averaging over one communicator; every rank calls the same methods in the same bucket order.

    Args:
        buckets: of all ranks' segments, the same on every rank.
        communicator: the data-parallel group.
        device: where buffers live.
        dtype: of gradients on the wire (DeepSpeed's `communication_data_type`).
    """

    def __init__(
        self, buckets: Sequence[Bucket], communicator: Communicator, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.buckets = tuple(buckets)
        self._communicator = communicator
        self.device = device
        self._dtype = dtype
        self._routes: dict[tuple[int, Receivers], Route] = {}
        self._owned = {bucket.index: self._owned_shards(bucket) for bucket in buckets}

    def held(self, bucket: Bucket) -> list[Fragment]:
        """What this rank holds of the bucket."""
        rank = self._communicator.rank
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
        rank = self._communicator.rank
        shards = [(segment, list(segment.cut(*segment.shard(rank)))) for segment in bucket.segments]
        return [(segment, fragments) for segment, fragments in shards if fragments]

    def reduce(self, bucket: Bucket, gradients: Views, averages: Sequence[torch.Tensor]) -> None:
        """Average `gradients` over each segment's holders into the owners' shards; args as `start_reduce`."""
        self.finish_reduce(self.start_reduce(bucket, gradients, averages))

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
        work = self._communicator.all_to_all(received, sent, route.sent_splits, route.received_splits)
        own = []
        for index, (_, fragments) in enumerate(self.owned(bucket)):
            sizes = [fragment.stop - fragment.start for fragment in fragments]
            own.append(torch.empty(sum(sizes), device=self.device) if averages is None else averages[index])
            torch._foreach_copy_(list(own[-1].split(sizes)), read(gradients, fragments, device=self.device))
        return Reduction(bucket, own, [sent, received], work)

    def finish_reduce(self, reduction: Reduction) -> None:
        """Wait for the others' contributions and average them with this rank's, in `reduction.averages`."""
        reduction.work.wait()
        reduction.work = Done()
        _, received = reduction.buffers
        reduction.buffers.clear()
        bucket, averages = reduction.bucket, reduction.averages
        owned = self.owned(bucket)
        position = 0
        for peer in range(self._communicator.size):
            if peer == self._communicator.rank:
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
        work = self._communicator.all_to_all(received, sent, route.received_splits, route.sent_splits)
        return Distribution(route, tensors, sent, received, work)

    def finish_distribute(self, running: Distribution) -> None:
        """Wait for what the owners sent and write it."""
        running.work.wait()
        if running.route.received:
            write(running.tensors, running.route.received, running.received.split(running.route.received_sizes))

    def _route(self, bucket: Bucket, receivers: Receivers) -> Route:
        key = (bucket.index, receivers)
        if key not in self._routes:
            self._routes[key] = back_route(bucket, self._communicator.rank, self._communicator.size, receivers)
        return self._routes[key]
