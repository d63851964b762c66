"""Which descriptions were tried out, for a plan that comes later."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import locate_branches, registry
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.masking.tried import Tried
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from tests.helpers.models import llama
from tests.helpers.own_layers import GPT, Block, attention_of, mlp_of


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    architectures.register(Block, attention_of(), mlp_of())


def plan_of(model: nn.Module, **block: Any) -> Plan:
    config = parse({KEY: {"holders": 1} | block})
    assert config is not None
    return plan_model(model, config, 2)[0]


def untried(model: nn.Module, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    branches = locate_branches(model)
    return Tried.of(model, branches, [plan_of(model, **first)]).untried(branches, plan_of(model, **second))


def test_what_a_plan_takes_a_description_for() -> None:
    model = GPT(Block)
    neuron, mixed = {"strategy": "neuron"}, {"strategy": {"attention": "block", "mlp": "neuron"}}
    for same in ({}, {"seed": 1}, {"regime": "backward"}, {"holders": 2}):
        assert untried(model, {}, same) == []
    assert untried(model, {}, mixed) == ["h.0 with a part of mlp", "h.1 with a part of mlp"]
    assert len(untried(model, {}, neuron)) == len(untried(model, neuron, {})) == 4
    assert untried(model, neuron, mixed) == ["h.0 without attention", "h.1 without attention"]
    assert untried(model, {}, {"granularity": "layer"})[0] == "h.0 without attention and mlp"


def test_what_rules_keep_whole_is_not_tried_out() -> None:
    model, rules = GPT(Block), {"strategy": "neuron", "holders": [{"units": "mlp", "holders": 1}, {"holders": 2}]}
    assert untried(model, rules, {"strategy": "neuron"}) == [
        "h.0 with a part of attention",
        "h.1 with a part of attention",
    ]
    assert untried(model, {"strategy": "neuron"}, rules) == []


def test_where_all_hold_everything_nothing_was_tried() -> None:
    assert len(untried(GPT(Block), {"holders": 2}, {})) == 4


def test_the_package_s_own_descriptions_need_no_trial() -> None:
    assert untried(llama(), {}, {"strategy": "neuron"}) == []
