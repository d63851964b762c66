"""Means of running statistics over the ranks that have a piece, whole or cut, of a hand-made plan."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.batch_norm import Estimate, RunningStatistics, batch_norms
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import named_tensors
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.threads import in_threads

SIZE, WIDTH, CPU = 3, 6, torch.device("cpu")
HOLDERS = ((0, 1), (1, 2), (0, 2))  # of a third of the vectors of "1" each
UNIT_HOLDERS = (0, 2)  # of "2"


class Group:
    """Threads that stand for ranks and add up."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE, timeout=240)
        self.tensors: list[Any] = [None] * SIZE
        self.num_sums = 0

    def of(self, rank: int) -> Any:
        return _Member(self, rank)


class _Member:
    size = SIZE

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self.rank = group, rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self._group.tensors[self.rank] = tensor.clone()
        self._group.barrier.wait()
        tensor.copy_(torch.stack(self._group.tensors).sum(0))
        self._group.barrier.wait()
        self._group.num_sums += not self.rank
        return tensor


def pieces_of(unit: int) -> list[Piece]:
    return [Piece(f"1.{name}", 0, 2 * unit, 2, "buffer") for name in ("running_mean", "running_var")]


def plan_of(regime: str) -> Plan:
    """A shared norm, one whose vectors are cut, one of a whole unit."""
    whole = [("running_mean", WIDTH), ("running_var", WIDTH), ("num_batches_tracked", 1)]
    units = [Unit(f"cut{index}", tuple(pieces_of(index))) for index in range(3)]
    units.append(Unit("whole", tuple(Piece(f"2.{name}", None, 0, length, "buffer") for name, length in whole)))
    options: dict[str, Any] = {
        "regime": regime,
        "strategy": "neuron",
        "num_subnetworks": SIZE,
        "num_holders": 2,
        "seed": 0,
    }
    return Plan(units=tuple(units), holders=(*HOLDERS, UNIT_HOLDERS), subnetwork_of_rank=(0, 1, 2), **options)


def masked(rank: int, regime: str) -> tuple[Any, RankModel]:
    """A rank's module, whose statistics are others than those of other ranks; as masking leaves it."""
    module: Any = nn.Sequential(*[nn.BatchNorm1d(WIDTH) for _ in range(3)])
    generator = torch.Generator().manual_seed(rank)
    for norm in batch_norms(module).values():
        for buffer in (norm.running_mean, norm.running_var):
            assert buffer is not None
            buffer.copy_(torch.randn(WIDTH, generator=generator))
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.fill_(10 + (rank == 1))
    views = PieceViews(named_tensors(module))
    for name in ("running_mean", "running_var"):
        buffer = views.tensors[f"1.{name}"]
        dense, pieces = buffer.clone(), [Piece(f"1.{name}", 0, 2 * unit, 2, "buffer") for unit in range(3)]
        held = [piece for piece, holders in zip(pieces, HOLDERS, strict=True) if rank in holders]
        lacking = [piece for piece in pieces if piece not in held]
        buffer.data = torch.cat([piece.narrow(dense) for piece in held])
        views.put(held)
        if regime == "backward":
            views.put(lacking, torch.cat([piece.narrow(dense) for piece in lacking]))
    if regime == "forward" and rank not in UNIT_HOLDERS:
        for buffer in (b for _, b in module[2].named_buffers()):
            buffer.data = torch.empty(0, dtype=buffer.dtype)
    return module, RankModel(plan_of(regime), (), views, rank)


def stored(model: RankModel, name: str, unit: int) -> torch.Tensor:
    return model.views.weight_view(Piece(f"1.{name}", 0, 2 * unit, 2, "buffer"))


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_each_piece_is_the_mean_over_those_that_run_it(regime: str) -> None:
    everyone = tuple(range(SIZE))
    ranks = [masked(rank, regime) for rank in everyone]
    holders = [everyone if regime == "backward" else of_unit for of_unit in (*HOLDERS, UNIT_HOLDERS)]
    expected: dict[Any, torch.Tensor] = {}
    for name in ("running_mean", "running_var"):
        expected["0", name] = torch.stack([getattr(module[0], name) for module, _ in ranks]).double().mean(0)
        expected["2", name] = torch.stack([getattr(ranks[r][0][2], name) for r in holders[3]]).double().mean(0)
        for unit in range(3):
            values = [stored(ranks[rank][1], name, unit) for rank in holders[unit]]
            expected[unit, name] = torch.stack(values).double().mean(0)
    group = Group()
    own = [RunningStatistics(module, model, group.of(rank), device=CPU) for rank, (module, model) in enumerate(ranks)]
    for _ in range(2):  # of equal values the mean is that value
        in_threads(lambda rank: own[rank].average(), SIZE)
        for (module, model), rank in zip(ranks, everyone, strict=True):
            for name in ("running_mean", "running_var"):
                assert torch.equal(getattr(module[0], name), expected["0", name].float())
                if rank in holders[3]:
                    assert torch.equal(getattr(module[2], name), expected["2", name].float())
                for unit in range(3):
                    if rank in holders[unit]:
                        assert torch.equal(stored(model, name, unit), expected[unit, name].float())
            counts = [int(module[index].num_batches_tracked) for index in (0, 1)]
            assert counts == [11, 11]
            if rank in holders[3]:
                assert int(module[2].num_batches_tracked) == (11 if regime == "backward" else 10)
    assert group.num_sums == 2


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_statistics_of_the_dense_model_are_cut_as_ranks_store_them(regime: str) -> None:
    estimates = {name: Estimate(torch.arange(6.0) + 1, torch.arange(6.0) + 20, 4) for name in ("0", "1", "2")}
    for rank in range(SIZE):
        module, model = masked(rank, regime)
        statistics = RunningStatistics(module, model, Group().of(rank), device=CPU)
        assert statistics.are_of_subnetworks() == (regime == "forward")
        statistics.write(estimates, in_module=False)
        assert not statistics.are_of_subnetworks()
        for unit, holders in enumerate(HOLDERS):
            if rank in holders or regime == "backward":
                assert stored(model, "running_mean", unit).tolist() == [2.0 * unit + 1, 2.0 * unit + 2]
                assert stored(model, "running_var", unit).tolist() == [2.0 * unit + 20, 2.0 * unit + 21]
        assert module[0].running_mean.tolist() == [1, 2, 3, 4, 5, 6]
        assert int(module[0].num_batches_tracked) == 4
        module[0].num_batches_tracked.add_(1)
        assert statistics.are_of_subnetworks() == (regime == "forward")


def test_a_warning_comes_once() -> None:
    module, model = masked(0, "forward")
    told: list[str] = []
    statistics = RunningStatistics(module, model, Group().of(0), device=CPU)
    for _ in range(2):
        statistics.warn_of_subnetworks(told.append, "this()")
    assert len(told) == 1
    assert "this()" in told[0]


def test_without_running_statistics_nobody_is_asked() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2))
    model = RankModel(plan_of("forward"), (), PieceViews(named_tensors(module)), 0)
    statistics = RunningStatistics(module, model, Group().of(0), device=CPU)
    statistics.average()
    assert not statistics.norms
    assert not statistics.tensors
    assert not statistics.are_of_subnetworks()
