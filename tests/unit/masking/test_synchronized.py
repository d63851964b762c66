"""Which ranks a synchronized norm is over, of hand-made plans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.synchronized import synchronize, synchronized_over
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors
from sdp_deepspeed.units import Piece, Unit

SOME = ((0, 2), (1, 2))  # subnetworks of two units


def model_of(module: nn.Module, *units: Unit, holders: tuple[tuple[int, ...], ...], **options: Any) -> RankModel:
    settings: dict[str, Any] = {"regime": "forward", "strategy": "block", "seed": 0, "num_holders": 2} | options
    plan = Plan(units=units, holders=holders, num_subnetworks=3, subnetwork_of_rank=(0, 0, 1, 1, 2, 2), **settings)
    return RankModel(plan, tuple(dense_tensors(module)), PieceViews(named_tensors(module)))


def net() -> Any:
    """A stem, a unit's linear layer and norm, a shared norm, a unit without."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    return nn.Sequential(nn.Linear(4, 4), inner, nn.SyncBatchNorm(4), nn.Linear(4, 4))


def block(module: nn.Module, prefix: str) -> Unit:
    pieces = [Piece(name, None, 0, p.numel()) for name, p in module.named_parameters() if name.startswith(prefix)]
    return Unit(prefix, tuple(pieces))


def test_the_holders_of_the_unit_with_all_replicas() -> None:
    module = net()
    units = block(module, "1."), block(module, "3.")
    assert synchronized_over(module, model_of(module, *units, holders=SOME), []) == {"1.1": (0, 1, 4, 5)}
    assert synchronized_over(module, model_of(module, *units, holders=SOME, regime="backward"), []) == {}
    every = ((0, 1, 2), (0, 1, 2))
    assert synchronized_over(module, model_of(module, *units, holders=every, num_holders=3), [], stage=2) == {}
    module[1][1], module[2] = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    assert synchronized_over(module, model_of(module, *units, holders=SOME), [], stage=2) == {}


def test_norms_of_ranks_that_lack_them_stay_as_they_are() -> None:
    cases: list[tuple[dict[tuple[int, ...], str], str | None]] = [({(0, 1): "theirs"}, "theirs"), ({}, None)]
    for groups, expected in cases:
        module = net()
        synchronize(module, {"1.1": (0, 1)}, groups)
        assert module[1][1].process_group == expected
        assert type(module[1][1]).__name__ == "SyncBatchNorm"
        assert isinstance(module[1][1], nn.SyncBatchNorm)
        assert module[2].process_group is None


def test_a_norm_of_cut_neurons_is_refused() -> None:
    module = net()
    cut = [Unit(f"u{i}", (Piece("1.0.weight", 0, 2 * i, 2), Piece("1.1.weight", 0, 2 * i, 2))) for i in range(2)]
    branch: Any = SimpleNamespace(
        name="b", bodies=("1",), modules=("1",), cut_tensors=[SimpleNamespace(parameter="1.0.weight")]
    )
    model = model_of(module, *cut, holders=((0, 1), (1, 2)), strategy="neuron")
    with pytest.raises(ValueError, match=r"'1\.1' is a SyncBatchNorm in a branch whose neurons are cut"):
        synchronized_over(module, model, [branch])


def test_what_comes_before_is_trained_by_all_ranks() -> None:
    module = net()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    model = model_of(module, block(module, "1."), block(module, "3."), holders=SOME)
    with pytest.raises(ValueError, match=r"'1\.1' is a SyncBatchNorm of a unit, and nothing that all ranks train"):
        synchronized_over(module, model, [])
