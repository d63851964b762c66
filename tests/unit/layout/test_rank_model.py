"""What one rank has: its units, and who stores each piece in either regime."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, named_tensors
from sdp_deepspeed.units import Piece, Unit

HOLDERS = ((0, 1), (1, 2), (0, 2))


def rank_model(regime: str, rank: int) -> RankModel:
    """Three linear layers, each a unit of two among three ranks, and one that all share."""
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("a", "b", "c", "shared")})
    module.register_buffer("count", torch.zeros(1))
    tensors = tuple(TensorInfo(name, (2, 2), torch.float32) for name, _ in module.named_parameters())
    units = tuple(Unit(name, (Piece(f"{name}.weight", None, 0, 4),)) for name in "abc")
    plan = Plan(regime, "block", 3, 2, 0, units, HOLDERS, (0, 1, 2))
    return RankModel(plan, tensors, PieceViews(named_tensors(module)), rank)


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_holds_what_the_plan_says(rank: int) -> None:
    model = rank_model("forward", rank)
    assert [model.holds(unit) for unit in range(3)] == [rank in holders for holders in HOLDERS]


def test_in_the_forward_regime_holders_store_and_what_is_shared_all() -> None:
    model = rank_model("forward", 0)
    assert not model.stores_all
    assert [ranks for _, ranks in model.pieces_with_storing_ranks()] == [*HOLDERS, (0, 1, 2)]


def test_in_the_backward_regime_all_store_all() -> None:
    model = rank_model("backward", 0)
    assert model.stores_all
    assert [ranks for _, ranks in model.pieces_with_storing_ranks()] == [(0, 1, 2)] * 4


def test_parameters_are_the_live_ones_and_no_buffers() -> None:
    model = rank_model("forward", 0)
    assert list(model.parameters()) == ["a.weight", "b.weight", "c.weight", "shared.weight"]
    assert all(model.views.tensors[name] is parameter for name, parameter in model.parameters().items())
