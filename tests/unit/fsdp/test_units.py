"""Which modules FSDP2 gathers together."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.fsdp.units import gathered_together
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors
from tests.helpers.models import llama
from tests.helpers.more_models import ALL_SPECIMENS


def planned(model: Any, block: dict[str, Any], num_ranks: int) -> tuple[Plan, dict[str, set[str]]]:
    """The plan, and the branches of each name."""
    settings = parse({KEY: block})
    assert settings is not None
    branches = locate_branches(model)
    plan, _ = plan_model(model, settings, num_ranks, branches=branches)
    together = defaultdict[str, set[str]](set)
    for branch, name in gathered_together(plan, dense_tensors(model), branches).items():
        together[name].add(branch)
    return plan, together


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"coverage": 1.0}, ["0", "1", "2", "3", "4", "5"]),
        ({"coverage": 0.5}, ["01", "23", "45"]),
        ({"coverage": [{"coverage": 0.5, "whole_ends": 1}]}, ["0", "12", "34", "5"]),
        ({"coverage": 0.5, "shared": [".*mlp.*"]}, ["0", "1", "2", "3", "4", "5"]),
    ],
)
def test_neurons_of_so_many_layers_as_are_one_whole_layer(block: dict[str, Any], expected: list[str]) -> None:
    _, together = planned(llama(6), {"strategy": "neuron", **block}, 4)
    found = [sorted({branch.split(".")[2] for branch in branches}) for branches in together.values()]
    assert ["".join(layers) for layers in found] == expected


@pytest.mark.parametrize("seed", range(4))
def test_no_rank_gathers_two_whole_layers(seed: int) -> None:
    """With layers as blocks, each of two ranks holds three of six."""
    plan, together = planned(llama(6), {"coverage": 0.5, "granularity": "layer", "seed": seed}, 2)
    holders = {unit.name: plan.ranks_of(index) for index, unit in enumerate(plan.units)}
    for branches in together.values():
        layers = {branch.rpartition(".")[0] for branch in branches}
        held = [rank for name, ranks in holders.items() if name in layers for rank in ranks]
        assert len(held) == len(layers)
        assert len(held) == len(set(held))
    assert len(together) < 6


def test_stacks_and_cross_attention_are_apart() -> None:
    """A decoder without an encoder skips cross-attention, so nothing else may wait for it."""
    _, together = planned(ALL_SPECIMENS["bart"].build(), {"strategy": "neuron", "coverage": 0.5}, 2)
    crossing = [branches for branches in together.values() if any("cross_attention" in name for name in branches)]
    assert crossing
    assert all(len(branches) == 1 for branches in crossing)
    stacks = [{name.rpartition(".layers.")[0] for name in branches} for branches in together.values()]
    assert all(len(of_range) == 1 for of_range in stacks)
    assert len({*map(frozenset, stacks)}) == 2
