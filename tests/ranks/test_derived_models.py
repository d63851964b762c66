"""Models of families that no description names, on both hosts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sdp_deepspeed
from sdp_deepspeed.fsdp import sharded_model_of
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.derived_models import DERIVED
from tests.helpers.hand_written import HAND_WRITTEN
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.sharded import check_against_reference, sharded
from tests.helpers.training import engine_of, sgd

pytestmark = pytest.mark.world(2)


@pytest.mark.parametrize(("name", "stage"), [("codegen", 1), ("megatron_bert", 2), ("mpt", 1)])
def test_the_engine_agrees_with_the_reference(rank: Rank, name: str, stage: int) -> None:
    check_case(Case(2, 1, model=name, stage=stage, optimizer="SGD"), rank)


def test_the_backward_regime_agrees_with_the_reference(rank: Rank) -> None:
    check_case(Case(2, 1, "backward", model="megatron_bert"), rank)


@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_neurons_and_heads_agree_with_the_reference(rank: Rank, regime: str) -> None:
    check_case(Case(2, 1, regime, "neuron", model="megatron_bert", optimizer="SGD"), rank)


@pytest.mark.parametrize(("name", "strategy"), [("mpt", {"attention": "block", "mlp": "neuron"}), ("mamba", "block")])
def test_fsdp2_agrees_with_the_reference(rank: Rank, name: str, strategy: Any) -> None:
    check_against_reference(rank, DERIVED[name].build(), {"holders": 1, "strategy": strategy}, optimizer="SGD")


def test_parameters_of_a_layer_with_several_branches(rank: Rank) -> None:
    """Are the branches', except with FSDP2, which shards the parameters of one module together."""

    def scales(plan: Plan) -> list[str]:
        return [piece.parameter for unit in plan.units for piece in unit.pieces if "gamma" in piece.parameter]

    written = HAND_WRITTEN["layer_scale"]
    models = [written.build(), written.build()]
    for model in models:
        sdp_deepspeed.trace(model, *written.example())
    assert len(scales(engine_of(sgd(holders=1), models[0]).plan)) == 6
    model = sharded(models[1], {"holders": 1})
    assert not scales(sharded_model_of(model).plan)
    model(*written.example()).square().mean().backward()
    assert torch.stack([p.grad.to_local().isfinite().all() for p in model.parameters() if p.grad is not None]).all()
