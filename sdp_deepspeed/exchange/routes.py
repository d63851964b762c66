"""Who sends what to whom in one collective of a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.segments import Bucket, Segment

Receivers = Literal["holders", "others", "all"]


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
        return [fragment.num_elements for fragment in self.sent]

    @cached_property
    def received_sizes(self) -> list[int]:
        return [fragment.num_elements for fragment in self.received]


def receives(segment: Segment, rank: int, receivers: Receivers) -> bool:
    """Whether `rank` is among the receivers of what the owners of `segment` send back."""
    if receivers == "all":
        return True
    return segment.held_by(rank) == (receivers == "holders")


def return_route(bucket: Bucket, rank: int, size: int, receivers: Receivers) -> Route:
    """The returning half for `rank`: its own shards to the receivers, theirs to it. Nobody sends to itself."""
    sent: list[Fragment] = []
    received: list[Fragment] = []
    sent_splits, received_splits = [0] * size, [0] * size
    for peer in range(size):
        if peer == rank:
            continue
        for segment in bucket.segments:
            if segment.held_by(rank) and receives(segment, peer, receivers):
                start, stop = segment.owned_range(rank)
                sent.extend(segment.cut(start, stop))
                sent_splits[peer] += stop - start
            if segment.held_by(peer) and receives(segment, rank, receivers):
                start, stop = segment.owned_range(peer)
                received.extend(segment.cut(start, stop))
                received_splits[peer] += stop - start
    return Route(tuple(sent), tuple(sent_splits), tuple(received), tuple(received_splits))
