"""Reduce and distribute against a computation by hand, on threads over gloo: one process group object per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Layout, random_layout, random_tensors

from sdp_deepspeed.communicator import Communicator
from sdp_deepspeed.exchange import Exchange, Receivers, read, receives, write
from sdp_deepspeed.plan import Plan
from sdp_deepspeed.segments import Fragment, TensorInfo
from sdp_deepspeed.units import Piece, Unit

TIMEOUT = timedelta(seconds=20)
SIZE = 8


class ThreadGroup:
    """The functions of `torch.distributed` that `Communicator` calls, for one thread; remembers what it sent."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
        self.sent: list[int] = []

    def get_rank(self, group: None) -> int:
        return self._group.rank()

    def get_world_size(self, group: None) -> int:
        return self._group.size()

    def all_to_all_single(
        self, received: torch.Tensor, sent: torch.Tensor, out_splits: list[int], in_splits: list[int], group: None
    ) -> None:
        assert received.is_contiguous()
        assert sent.is_contiguous()
        assert received.numel() == 0 or received.data_ptr() != sent.data_ptr()
        self.sent.append(sent.numel())
        self._group.alltoall_base(received, sent, out_splits, in_splits, dist.AllToAllOptions()).wait()


class Ranks:
    """Threads that stand for ranks; made once, since connecting them is what takes time."""

    def __init__(self, size: int) -> None:
        self.groups: list[Any] = [None] * size
        store = dist.HashStore()
        self._start(lambda rank: self.groups.__setitem__(rank, ThreadGroup(store, rank, size)), size)

    def run(self, work: Callable[[Communicator], Any]) -> list[Any]:
        """Results by rank; the first rank's error is raised."""
        for group in self.groups:
            group.sent.clear()
        return self._start(lambda rank: work(Communicator(self.groups[rank])), len(self.groups))

    @staticmethod
    def _start(work: Callable[[int], Any], size: int) -> list[Any]:
        results: list[Any] = [None] * size
        errors: dict[int, BaseException] = {}

        def call(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=call, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=2 * TIMEOUT.total_seconds())
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        for error in errors.values():
            raise error
        return results


@pytest.fixture(scope="module", params=[1, 2, 3, SIZE])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


@pytest.fixture(scope="module")
def eight() -> Ranks:
    return Ranks(SIZE)


def exchange_of(layout: Layout, communicator: Communicator, dtype: torch.dtype = torch.float32) -> Exchange:
    return Exchange(layout.buckets, communicator, device=torch.device("cpu"), dtype=dtype)


def reduced(layout: Layout, communicator: Communicator, dtype: torch.dtype, missing: str | None) -> dict[str, Any]:
    """Owned averages of one rank, written into dense tensors of NaN."""
    gradients: dict[str, torch.Tensor | None] = dict(random_tensors(layout, communicator.rank, dtype=torch.float32))
    if missing is not None and communicator.rank == 0:
        gradients[missing] = None
    exchange = exchange_of(layout, communicator, dtype)
    result = {info.name: torch.full(info.shape, torch.nan) for info in layout.tensors}
    for bucket in layout.buckets:
        owned = exchange.owned(bucket)
        averages = [torch.full((sum(f.stop - f.start for f in shard),), torch.nan) for _, shard in owned]
        exchange.reduce(bucket, gradients, averages)
        for (_, shard), average in zip(owned, averages, strict=True):
            write(result, shard, average.split([f.stop - f.start for f in shard]))
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


@pytest.mark.parametrize("seed", range(6))
def test_reduce_averages_over_holders(ranks: Ranks, seed: int) -> None:
    layout = random_layout(seed, len(ranks.groups))
    missing = "t0" if seed % 2 else None
    found = ranks.run(lambda communicator: reduced(layout, communicator, torch.float32, missing))
    for name, expected in expected_averages(layout, missing).items():
        parts = torch.stack([rank[name] for rank in found])
        owners = (~parts.isnan()).sum(0)
        assert bool((owners == 1).all()), f"{name}: elements with {owners.unique().tolist()} owners"
        # at most eight fp32 additions in another order
        torch.testing.assert_close(parts.nansum(0), expected, rtol=8 * 2**-23, atol=8 * 2**-23)


def test_half_precision_on_the_wire_is_added_in_fp32(eight: Ranks) -> None:
    """256 + 1 is 256 in bf16, which has 8 significant bits; a sum in bf16 would lose all seven ones."""
    layout = shared_layout(16)

    def average(communicator: Communicator) -> torch.Tensor:
        exchange = exchange_of(layout, communicator, torch.bfloat16)
        gradient = torch.full((16,), 256.0 if communicator.rank == 3 else 1.0)
        result = torch.empty(2)
        exchange.reduce(layout.buckets[0], {"w": gradient}, [result])
        return result

    assert torch.cat(eight.run(average)).tolist() == [(256 + 7) / SIZE] * 16


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
        exchange.distribute(bucket, tensors, receivers=receivers)
    return tensors


def expected_marks(layout: Layout, rank: int, receivers: Receivers) -> dict[str, torch.Tensor]:
    result = marks(layout, rank)
    for segment in layout.segments:
        if receivers == "all" or (rank in segment.holders) == (receivers == "holders"):
            for owner in segment.holders:
                for fragment in segment.cut(*segment.shard(owner)):
                    view = fragment.piece.narrow(result[fragment.piece.parameter])
                    flat = view.reshape(-1).clone()
                    flat[fragment.start : fragment.stop] = owner + 1
                    view.copy_(flat.view(view.shape))
    return result


@pytest.mark.parametrize("receivers", ["holders", "others", "all"])
@pytest.mark.parametrize("seed", range(6, 10))
def test_distribute_reaches_exactly_the_receivers(ranks: Ranks, seed: int, receivers: Receivers) -> None:
    layout = random_layout(seed, len(ranks.groups))
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
    # A shard is rounded up to whole elements: its owner may send up to one more element to each other holder.
    rounding = max(len(bucket.segments) for bucket in layout.buckets) * SIZE
    for group in eight.groups:
        assert len(group.sent) == 2 * len(layout.buckets)
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


def test_a_rank_without_a_part_in_a_bucket_still_takes_part(eight: Ranks) -> None:
    """With one holder for each unit nobody sends anything, and nobody hangs."""
    units = tuple(Unit(f"u{i}", (Piece(f"u{i}", None, 0, 5),)) for i in range(SIZE))
    tensors = tuple(TensorInfo(unit.name, (5,), torch.float32, 0) for unit in units)
    alone = tuple((i,) for i in range(SIZE))
    layout = Layout(SIZE, tensors, Plan("forward", "block", SIZE, 1, 0, units, alone, tuple(range(SIZE))), 5)
    found = eight.run(lambda communicator: reduced(layout, communicator, torch.float32, None))
    for rank, averages in enumerate(found):
        own = random_tensors(layout, rank)
        assert all(torch.equal(averages[f"u{i}"], own[f"u{i}"]) == (i == rank) for i in range(SIZE))
    assert all(set(group.sent) == {0} for group in eight.groups)


def test_collect_returns_one_segment_in_order(eight: Ranks) -> None:
    """Eleven elements over the holders 2, 3, 7; the others receive them flat, in the caller's buffer."""
    holders = ((2, 3, 7), *[tuple(sorted((r, (r + 1) % SIZE, (r + 2) % SIZE))) for r in range(SIZE)])
    units = tuple(Unit(f"u{i}", (Piece(f"u{i}", None, 0, 11),)) for i in range(SIZE + 1))
    tensors = (TensorInfo("u0", (11,), torch.float32, 0),)
    layout = Layout(SIZE, tensors, Plan("forward", "block", SIZE, 3, 0, units, holders, tuple(range(SIZE))), 100)

    def collect(communicator: Communicator) -> torch.Tensor:
        held = communicator.rank in holders[0]
        out = torch.empty(0 if held else 11)
        weights = {"u0": torch.arange(11.0) if held else torch.empty(0)}
        found = exchange_of(layout, communicator).collect(layout.buckets[0], weights, receivers="others", out=out)
        assert held or found.data_ptr() == out.data_ptr()
        return found

    for rank, found in enumerate(eight.run(collect)):
        assert found.tolist() == ([] if rank in holders[0] else list(range(11)))


def test_read_and_write_column_slices() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    piece = Piece("w", 1, 1, 2)
    fragments = [Fragment(piece, 1, 4), Fragment(piece, 4, 6)]
    assert [value.tolist() for value in read({"w": tensor}, fragments)] == [[2, 5, 6], [9, 10]]
    assert [value.tolist() for value in read({"w": None}, fragments)] == [[0, 0, 0], [0, 0]]
    write({"w": tensor}, fragments, [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, -5.0])])
    assert tensor.tolist() == [[0, 1, -1, 3], [4, -2, -3, 7], [8, -4, -5, 11]]


def test_receivers() -> None:
    segment = random_layout(0, 4).segments[0]
    for rank in range(4):
        held = rank in segment.holders
        found = [receives(segment, rank, receivers) for receivers in ("holders", "others", "all")]
        assert found == [held, not held, True]
