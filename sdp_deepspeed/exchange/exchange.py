"""The collectives of a bucket: gradients to the owners, results back (see README.md beside this file).

Reducing adds up the contributions of each node in fp32 on its carriers, then those of all nodes on the owners, who
divide by the number of holders. Distributing sends what the owners have back: updated weights (stage 1) or averaged
gradients (stage 0). One is the other in reverse, so the same routes serve both. A collective in which no rank has
anything to send is left out, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.routes import Half, Route, Stretch, carried, owned, routes_back
from sdp_deepspeed.layout.fragments import Fragment, Views, read, write
from sdp_deepspeed.layout.nodes import Nodes, Receivers
from sdp_deepspeed.layout.segments import Bucket, Segment

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
        stretches = owned(bucket, self._dp_group.rank)
        return [(bucket.segments[s.segment], list(s.fragments(bucket.segments))) for s in stretches]

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
        shards = _Sums(owned(bucket, self._dp_group.rank), averages)
        sums = shards  # where no other node has a part, they are all that this rank carries
        if between.is_needed:
            slices = carried(bucket, self._dp_group.rank, self._nodes)
            sums = _Sums(slices, [torch.empty(s.num_elements, device=self.device) for s in slices])
        for stretch, total in sums:
            self._gather(list(stretch.fragments(bucket.segments)), gradients, total)
        if inside.is_needed:
            steps = self._travel(self._packed(inside.received, gradients, self._dtype), inside.received, inside.sent)
            packed()
            sums.add(inside.sent, (yield from steps))
        else:
            packed()
        if between.is_needed:
            for stretch, average in shards:
                average.copy_(sums.part(stretch))
            leaving = sums.packed(between.received, self._dtype, self.device)
            steps = self._travel(leaving, between.received, between.sent)
            del sums, leaving
            shards.add(between.sent, (yield from steps))
        if averages:
            torch._foreach_div_(list(averages), [float(len(segment.holders)) for segment, _ in self.owned(bucket)])

    def distribute(self, bucket: Bucket, tensors: Views, *, receivers: Receivers = "holders") -> Steps:
        """Send the owners' shards of `tensors` to the receivers, who write them into theirs.

        Args:
            tensors: this rank's own shards are read at once, what it receives is overwritten.
        """
        for route in self._routes_of(bucket, receivers):
            if route.is_needed:
                sent = self._packed(route.sent, tensors, bucket.segments[0].dtype)
                received = yield from self._travel(sent, route.sent, route.received)
                if route.received.fragments:
                    write(tensors, route.received.fragments, route.received.pieces(received))

    def _travel(self, buffer: torch.Tensor, sent: Half, received: Half) -> Generator[None, None, torch.Tensor]:
        """What arrives. Both buffers live as long as the collective runs."""
        arriving = torch.empty(sum(received.splits), dtype=buffer.dtype, device=self.device)
        work = self._dp_group.all_to_all(arriving, buffer, received.splits, sent.splits)
        yield
        work.wait()
        return arriving

    def _packed(self, half: Half, tensors: Views, dtype: torch.dtype) -> torch.Tensor:
        """What is sent, read from `tensors`; what goes to several ranks is read once."""
        buffer = torch.empty(sum(half.splits), dtype=dtype, device=self.device)
        if half.stretches:
            torch._foreach_copy_(half.pieces(buffer), read(tensors, half.fragments, device=self.device))
        if half.repeats:
            parts = half.parts(buffer)
            torch._foreach_copy_([parts[i] for i, _ in half.repeats], [parts[i] for _, i in half.repeats])
        return buffer

    def _gather(self, fragments: Sequence[Fragment], tensors: Views, buffer: torch.Tensor) -> None:
        if fragments:
            parts = buffer.split([fragment.num_elements for fragment in fragments])
            torch._foreach_copy_(list(parts), read(tensors, fragments, device=self.device))

    def _routes_of(self, bucket: Bucket, receivers: Receivers) -> tuple[Route, Route]:
        key = (bucket.index, receivers)
        if key not in self._routes:
            self._routes[key] = routes_back(bucket, self._dp_group.rank, self._nodes, receivers)
        return self._routes[key]


class _Sums:
    """fp32 sums of stretches, at most one of each segment.

    Args:
        totals: flat, one per stretch.
    """

    def __init__(self, stretches: Sequence[Stretch], totals: Sequence[torch.Tensor]) -> None:
        self._by_segment = {s.segment: (s, total) for s, total in zip(stretches, totals, strict=True)}

    def __iter__(self) -> Iterator[tuple[Stretch, torch.Tensor]]:
        return iter(self._by_segment.values())

    def part(self, stretch: Stretch) -> torch.Tensor:
        whole, total = self._by_segment[stretch.segment]
        return total.narrow(0, stretch.start - whole.start, stretch.num_elements)

    def packed(self, half: Half, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Parts of the sums, in the order of a buffer."""
        buffer = torch.empty(sum(half.splits), dtype=dtype, device=device)
        if half.stretches:
            torch._foreach_copy_(half.parts(buffer), [self.part(stretch) for stretch in half.stretches])
        return buffer

    def add(self, half: Half, received: torch.Tensor) -> None:
        """Contributions of all peers, one after the other; in fp32 before they are added, since mixed dtypes are a
        launch per tensor."""
        for stretches, contribution in zip(half.by_peer, received.split(half.splits), strict=True):
            if stretches:
                sizes = [stretch.num_elements for stretch in stretches]
                parts = contribution[: sum(sizes)].float().split(sizes)
                torch._foreach_add_([self.part(stretch) for stretch in stretches], list(parts))
