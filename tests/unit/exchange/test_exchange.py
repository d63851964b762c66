"""What is distributed against a computation by hand, on threads over gloo."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.exchange import Exchange, Steps
from sdp_deepspeed.layout.nodes import Receivers
from tests.helpers.random_layouts import NODES, Layout, indices, placed, random_layout, views_of
from tests.helpers.threads import Ranks

SIZE = 8


@pytest.fixture(scope="module", params=[1, 2, 3, SIZE])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


def exchange_of(layout: Layout, communicator: Communicator) -> Exchange:
    return Exchange(layout.buckets, communicator, layout.nodes, device=torch.device("cpu"))


def complete(steps: Steps) -> None:
    """All of its collectives."""
    deque(steps, maxlen=0)


def marks(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    return {info.name: torch.full(info.shape, float(rank + 1), dtype=info.dtype) for info in layout.tensors}


def marked(layout: Layout, communicator: Communicator, receivers: Receivers) -> dict[str, torch.Tensor]:
    """Every rank's tensors say who wrote them (rank + 1) before the owners' shards are sent."""
    tensors = marks(layout, communicator.rank)
    exchange = exchange_of(layout, communicator)
    for bucket in layout.buckets:
        complete(exchange.distribute(bucket, views_of(tensors), receivers=receivers))
    return tensors


def expected_marks(layout: Layout, rank: int, receivers: Receivers) -> dict[str, torch.Tensor]:
    """Everything comes from its owner, but for what ranks without a segment get from the holders of their own node."""
    result = marks(layout, rank)
    for segment in layout.segments:
        if receivers == "all" or (rank in segment.holders) == (receivers == "holders"):
            near = [peer for peer in layout.nodes.neighbors(rank) if peer in segment.holders]
            shards = [(owner, *segment.owned_range(owner)) for owner in segment.holders]
            for writer, start, stop in segment.slices(near) if near and receivers == "others" else shards:
                for fragment in segment.cut(start, stop):
                    tensor = result[fragment.piece.parameter]
                    tensor.view(-1)[indices(fragment, tensor.shape)] = writer + 1
    return result


@pytest.mark.parametrize("receivers", ["holders", "others", "all"])
@pytest.mark.parametrize(("seed", "nodes"), [*enumerate(NODES)])
def test_distribute_reaches_exactly_the_receivers(ranks: Ranks, seed: int, receivers: Receivers, nodes: str) -> None:
    layout = placed(random_layout(seed, len(ranks.groups)), nodes)
    found = ranks.run(lambda communicator: marked(layout, communicator, receivers))
    for rank, tensors in enumerate(found):
        for name, expected in expected_marks(layout, rank, receivers).items():
            assert torch.equal(tensors[name], expected), (rank, name)


def test_two_collectives_per_bucket_at_most() -> None:
    """One where all ranks are on one node; none for a bucket that nobody shares."""
    eight = Ranks(SIZE)
    layout = random_layout(0, SIZE)
    eight.run(lambda communicator: marked(layout, communicator, "holders"))
    shared = [bucket for bucket in layout.buckets if any(len(segment.holders) > 1 for segment in bucket.segments)]
    assert {len(group.sent) for group in eight.groups} == {len(shared)}
