"""Reduce and distribute against a computation by hand, on threads over gloo."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from sdp_deepspeed.deferred_init.materialize import default_dtype

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.exchange.exchange import Exchange, Steps
from sdp_deepspeed.layout.fragments import num_elements
from sdp_deepspeed.layout.nodes import Receivers
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.random_layouts import NODES, Layout, indices, placed, random_layout, random_tensors, views_of
from tests.helpers.threads import Ranks

SIZE = 8


@pytest.fixture(scope="module", params=[1, 2, 3, SIZE])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


@pytest.fixture(scope="module")
def eight() -> Ranks:
    return Ranks(SIZE)


def exchange_of(layout: Layout, communicator: Communicator, dtype: torch.dtype = torch.float32) -> Exchange:
    return Exchange(layout.buckets, communicator, layout.nodes, device=torch.device("cpu"), dtype=dtype)


def complete(steps: Steps) -> None:
    """All of its collectives."""
    deque(steps, maxlen=0)


def reduced(layout: Layout, communicator: Communicator, dtype: torch.dtype, missing: str | None) -> dict[str, Any]:
    """Owned averages of one rank, written into dense tensors of NaN."""
    gradients: dict[str, torch.Tensor | None] = dict(random_tensors(layout, communicator.rank, dtype=torch.float32))
    if missing is not None and communicator.rank == 0:
        gradients[missing] = None
    exchange = exchange_of(layout, communicator, dtype)
    result = {info.name: torch.full(info.shape, torch.nan) for info in layout.tensors}
    for bucket in layout.buckets:
        owned = exchange.owned(bucket)
        averages = [torch.full((num_elements(shard),), torch.nan) for _, shard in owned]
        complete(exchange.reduce(bucket, views_of(gradients), averages))
        exchange.keep(bucket, averages, views_of(result))
    return result


def expected_averages(layout: Layout, missing: str | None) -> dict[str, torch.Tensor]:
    """Mean over holders, element by element; shared elements over all ranks."""
    gradients = [random_tensors(layout, rank, dtype=torch.float32) for rank in range(layout.size)]
    if missing is not None:
        gradients[0][missing].zero_()
    result = {name: torch.stack([g[name] for g in gradients]).sum(0) / layout.size for name in gradients[0]}
    for index, unit in enumerate(layout.plan.units):
        holders = layout.plan.ranks_of(index)
        for piece in unit.pieces:
            held = [piece.narrow(gradients[rank][piece.parameter]) for rank in holders]
            piece.narrow(result[piece.parameter]).copy_(torch.stack(held).sum(0) / len(holders))
    return result


@pytest.mark.parametrize(("seed", "nodes"), [*enumerate([*NODES, *NODES])])
def test_reduce_averages_over_holders(ranks: Ranks, seed: int, nodes: str) -> None:
    layout = placed(random_layout(seed, len(ranks.groups)), nodes)
    missing = "t0" if seed % 2 else None
    found = ranks.run(lambda communicator: reduced(layout, communicator, torch.float32, missing))
    for name, expected in expected_averages(layout, missing).items():
        parts = torch.stack([rank[name] for rank in found])
        owners = (~parts.isnan()).sum(0)
        assert bool((owners == 1).all()), f"{name}: elements with {owners.unique().tolist()} owners"
        # at most eight fp32 additions in another order
        torch.testing.assert_close(parts.nansum(0), expected, rtol=8 * 2**-23, atol=8 * 2**-23)


def average_of(layout: Layout, communicator: Communicator, dtype: torch.dtype, gradient: float) -> torch.Tensor:
    """This rank's two averages of sixteen elements."""
    exchange = exchange_of(layout, communicator, dtype)
    result = torch.empty(2, dtype=torch.float32)
    gradients = views_of({"w": torch.full((16,), gradient, dtype=torch.float32)})
    complete(exchange.reduce(layout.buckets[0], gradients, [result]))
    return result


@pytest.mark.parametrize("nodes", ["one", "halves"])
def test_half_precision_on_the_wire_is_added_in_fp32(eight: Ranks, nodes: str) -> None:
    """256 + 1 is 256 in bf16, which has 8 significant bits; a sum in bf16 would lose all ones. Over nodes the part of
    each is rounded once: 259 / 8 = 32.375 to 32.25 or 32.5, and 4 / 8 not."""
    layout = placed(shared_layout(16), nodes)
    found = eight.run(
        lambda communicator: average_of(layout, communicator, torch.bfloat16, 256.0 if communicator.rank == 3 else 1.0)
    )
    expected = {(256 + 7) / SIZE} if nodes == "one" else {(256 + 7) / SIZE, 32.25 + 0.5, 32.5 + 0.5}
    assert set(torch.cat(found).tolist()) <= expected


def test_the_sum_of_a_node_need_not_fit_into_half_precision(eight: Ranks) -> None:
    layout = placed(shared_layout(16), "halves")
    found = eight.run(lambda communicator: average_of(layout, communicator, torch.float16, 40_000.0))
    assert torch.cat(found).tolist() == [40_000.0] * 16


def shared_layout(num_elements: int) -> Layout:
    """One shared tensor `w`, and the units that a plan needs."""
    units = tuple(Unit(f"u{i}", (Piece(f"u{i}", None, 0, 1),)) for i in range(SIZE))
    plan = Plan("forward", "block", SIZE, 1, 0, units, tuple((i,) for i in range(SIZE)), tuple(range(SIZE)))
    return Layout(SIZE, (TensorInfo("w", (num_elements,), torch.float32, 0),), plan, 1000)


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


@pytest.mark.parametrize("seed", range(4))
def test_two_collectives_per_bucket_in_bounded_buffers(eight: Ranks, seed: int) -> None:
    layout = random_layout(seed, SIZE)

    def both(communicator: Communicator) -> None:
        reduced(layout, communicator, torch.float32, None)
        marked(layout, communicator, "holders")

    eight.run(both)
    shared = [bucket for bucket in layout.buckets if any(len(segment.holders) > 1 for segment in bucket.segments)]
    # A shard is rounded up to whole elements: its owner may send up to one more element to each other holder.
    rounding = max(len(bucket.segments) for bucket in layout.buckets) * SIZE
    for group in eight.groups:
        assert len(group.sent) == 2 * len(shared)
        assert max(group.sent) <= layout.max_elements + rounding


def test_traffic_is_the_lower_bound(eight: Ranks) -> None:
    """One unit of 24 elements per rank pair: 2 C (h-1)/h of all units, where C counts what this rank holds."""
    units = tuple(Unit(f"u{i}", (Piece(f"u{i}", None, 0, 24),)) for i in range(SIZE))
    holders = tuple(tuple(sorted((i, (i + 1) % SIZE))) for i in range(SIZE))
    tensors = tuple(TensorInfo(unit.name, (24,), torch.float32, 0) for unit in units)
    layout = Layout(SIZE, tensors, Plan("forward", "block", SIZE, 2, 0, units, holders, tuple(range(SIZE))), 1000)

    def both(communicator: Communicator) -> None:
        reduced(layout, communicator, torch.float32, None)
        marked(layout, communicator, "holders")

    eight.run(both)
    assert [group.sent for group in eight.groups] == [[24, 24]] * SIZE  # two units held, half of each sent, twice


def test_a_bucket_without_two_holders_is_not_sent(eight: Ranks) -> None:
    """Everybody knows that nobody has anything to send."""
    units = tuple(Unit(f"u{i}", (Piece(f"u{i}", None, 0, 5),)) for i in range(SIZE))
    tensors = tuple(TensorInfo(unit.name, (5,), torch.float32, 0) for unit in units)
    alone = tuple((i,) for i in range(SIZE))
    layout = Layout(SIZE, tensors, Plan("forward", "block", SIZE, 1, 0, units, alone, tuple(range(SIZE))), 5)
    found = eight.run(lambda communicator: reduced(layout, communicator, torch.float32, None))
    for rank, averages in enumerate(found):
        own = random_tensors(layout, rank)
        assert all(torch.equal(averages[f"u{i}"], own[f"u{i}"]) == (i == rank) for i in range(SIZE))
    assert not any(group.sent for group in eight.groups)


def test_sums_are_fp32_whatever_the_default_dtype(eight: Ranks) -> None:
    """Without it: 256 + 1 is 256 in bf16; on two nodes, so that sums of neighbors are tried too."""
    layout = placed(shared_layout(16), "halves")

    def average(communicator: Communicator) -> torch.Tensor:
        return average_of(layout, communicator, torch.float32, 256.0 if communicator.rank == 3 else 1.0)

    with default_dtype(torch.bfloat16):
        found = torch.cat(eight.run(average))
    assert found.tolist() == [(256 + 7) / SIZE] * 16
