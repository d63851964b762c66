"""Which modules FSDP2 gathers together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from sdp_deepspeed.fsdp.fsdp_groups import gathered_together
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import dense_tensors
from sdp_deepspeed.planner import plan_model
from tests.helpers.models import SPECIMENS, llama, parsed
from tests.helpers.more_models import ALL_SPECIMENS

NEURON: dict[str, Any] = {"strategy": "neuron", "coverage": 0.5}


def planned(
    model: Any, block: dict[str, Any], num_ranks: int, holders: dict[str, int] | None = None
) -> tuple[Plan, dict[str, set[str]]]:
    """The plan, and the branches of each name.

    Args:
        holders: the rank that holds all units of a layer, by the layer's path.
    """
    branches = proven_branches(model, "neuron")
    plan, _ = plan_model(model, parsed(**block), num_ranks, branches=branches)
    if holders is not None:
        own = [next(rank for layer, rank in holders.items() if unit.name.startswith(layer)) for unit in plan.units]
        plan = replace(plan, holders=tuple((rank,) for rank in own))
    together = defaultdict[str, set[str]](set)
    for branch, name in gathered_together(plan, dense_tensors(model), branches).items():
        together[name].add(branch)
    return plan, together


def layers_of(together: dict[str, set[str]]) -> list[str]:
    """Numbers of the layers of each name."""
    return ["".join(sorted({branch.split(".")[2] for branch in branches})) for branches in together.values()]


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
    assert layers_of(together) == expected


def test_layers_of_another_dtype_are_apart() -> None:
    """FSDP2 requires one dtype in a group."""
    model: Any = llama(4)
    model.model.layers[1].bfloat16()
    _, together = planned(model, NEURON, 4)
    assert layers_of(together) == ["0", "1", "23"]


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


def test_the_rank_that_holds_most_decides() -> None:
    """Whatever ranks hold on average."""
    holders = {f"model.layers.{layer}": rank for layer, rank in enumerate((0, 0, 1, 1))}
    _, together = planned(llama(4), {"holders": 1}, 2, holders)
    assert layers_of(together) == ["0", "12", "3"]
    _, together = planned(SPECIMENS["gpt_neox_parallel"].build(), {**NEURON, "neuron_groups": 6}, 4)
    assert len(together) == 2, "some rank holds more than half of a layer"


def test_stacks_and_cross_attention_are_apart() -> None:
    """A decoder without an encoder skips cross-attention, so nothing else may wait for it."""
    layers = [f"model.{stack}.layers.{number}" for stack in ("encoder", "decoder") for number in (0, 1)]
    model = ALL_SPECIMENS["bart"].build()
    _, together = planned(model, {"holders": 1}, 4, {layer: rank for rank, layer in enumerate(layers)})
    crossing = [branches for branches in together.values() if any("cross_attention" in name for name in branches)]
    assert crossing
    assert all(len(branches) == 1 for branches in crossing)
    others = [branches for branches in together.values() if branches not in crossing]
    assert [{name.rpartition(".layers.")[0] for name in branches} for branches in others] == [
        {"model.encoder"},
        {"model.decoder"},
    ]
