"""What is added up of a bucket: every contribution once, each element's in the order of peers, in few rounds."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.exchange.routes import Half, Stretch, routes_back
from sdp_deepspeed.exchange.sums import BucketSums, Sums
from sdp_deepspeed.layout.buckets import Bucket
from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.segments import Segment
from sdp_deepspeed.units import Piece
from tests.helpers.random_layouts import NODES, Layout, placed, random_layout

layouts = st.builds(
    placed, st.builds(random_layout, st.integers(0, 100_000), st.integers(1, 8)), st.sampled_from(sorted(NODES))
)


def one_by_one(half: Half, received: torch.Tensor, sums: Sums, flats: Sequence[torch.Tensor]) -> None:
    """Contributions stretch by stretch, in the order in which they lie in the buffer."""
    for stretch, (_, start) in zip(half.stretches, half.locations, strict=True):
        tensor, offset = sums.location(stretch)
        flats[tensor][offset : offset + stretch.num_elements] += received[start : start + stretch.num_elements].float()


@given(layouts, st.sampled_from([torch.float32, torch.bfloat16]))
def test_rounds_are_the_same_bits_as_one_after_the_other(layout: Layout, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for bucket in layout.buckets:
        for rank in range(layout.size):
            routes = routes_back(bucket, rank, layout.nodes, "holders")
            between, inside = routes
            found = BucketSums(bucket, rank, layout.nodes, routes)
            halves = [(found.carried, inside.sent)] + [(found.shards, between.sent)] * between.is_needed
            for sums, half in halves:
                received = torch.randn(half.num_elements, generator=generator).to(dtype)
                in_one = between.is_needed and sums is found.carried
                sizes = [sums.num_elements] if in_one else [stretch.num_elements for stretch in sums.stretches]
                flats, expected = ([torch.ones(size) for size in sizes] for _ in range(2))
                sums.add(received, flats)
                one_by_one(half, received, sums, expected)
                assert all(map(torch.equal, flats, expected))


def sums_of(num_ranks: int, num_segments: int) -> tuple[Sums, Half]:
    """On one node, every segment on every rank."""
    piece, ranks = Piece("w", None, 0, 24 * num_segments), tuple(range(num_ranks))
    fragments = [Fragment(piece, 24 * i, 24 * (i + 1)) for i in range(num_segments)]
    bucket = Bucket(0, tuple(Segment(0, torch.float32, ranks, (fragment,)) for fragment in fragments))
    _, inside = routes_back(bucket, 0, Nodes.one(num_ranks), "holders")
    stretches = [Stretch(index, *segment.owned_range(0)) for index, segment in enumerate(bucket.segments)]
    return Sums(bucket, stretches, in_one=True, contributions=inside.sent), inside.sent


@pytest.mark.parametrize("num_segments", [1, 20])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_peer_is_one_view_and_one_launch(num_ranks: int, num_segments: int) -> None:
    """Of whatever number of segments that it shares with this rank."""
    sums, half = sums_of(num_ranks, num_segments)
    flat, received = torch.zeros(sums.num_elements), torch.ones(half.num_elements)
    with mock.patch.object(torch, "_foreach_add_", wraps=torch._foreach_add_) as launched:
        sums.add(received, [flat])
    assert [len(targets) for targets, _ in (call.args for call in launched.call_args_list)] == [1] * (num_ranks - 1)
    assert bool((flat == num_ranks - 1).all())
    with mock.patch.object(torch, "_foreach_div_", wraps=torch._foreach_div_) as launched:
        sums.divide([flat])
    ((parts, counts),) = (call.args for call in launched.call_args_list)
    assert (len(parts), counts) == (1, [float(num_ranks)])
    assert bool((flat == (num_ranks - 1) / num_ranks).all())
