"""From a model and the block to a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import unit_costs
from sdp_deepspeed.plan.tensors import dense_tensors, pieces_by_tensor
from sdp_deepspeed.planner import plan_model
from tests.helpers.core_masks import families
from tests.helpers.models import SPECIMENS, llama, parsed
from tests.helpers.more_models import ALL_SPECIMENS


def plan_of(num_ranks: int = 4, num_layers: int = 4, **settings: Any) -> Plan:
    return plan_model(llama(num_layers), parsed(**settings), num_ranks)[0]


def test_replicas_are_neighbors() -> None:
    plan = plan_of(8, coverage=0.5, subnetworks=4)
    assert plan.subnetwork_of_rank == (0, 0, 1, 1, 2, 2, 3, 3)
    assert (plan.hash, plan.spectral_gap()) == (plan_of(4, coverage=0.5).hash, plan_of(4, coverage=0.5).spectral_gap())
    assert len(plan.ranks_of(0)) == 4
    assert plan_of(64, 8, coverage=0.5).num_subnetworks == 16
    assert plan_of(3, coverage=1.0, subnetworks=1).holders == ((0,),) * 8
    with pytest.raises(ValueError, match=r"got 3 subnetworks, which do not divide the 4 .* possible: 1, 2, 4"):
        plan_of(4, coverage=1.0, subnetworks=3)


@pytest.mark.parametrize("family", families(SPECIMENS, ("llama", "gpt2")))
@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_every_family_is_balanced_where_its_units_allow_it(family: str, strategy: str) -> None:
    model = SPECIMENS[family].build()
    for coverage in (0.5, 0.75):
        try:
            plan, _ = plan_model(model, parsed(coverage=coverage, strategy=strategy), 4)
        except ValueError:  # too few heads or blocks
            continue
        flops = [cost.flops for cost in unit_costs(model, plan.units)]
        assert plan.imbalance(flops) <= 1.05 or len(flops) < 4, coverage


@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_coverage_by_depth_and_by_name(strategy: str) -> None:
    rules = [{"units": "attention", "coverage": 0.75}, {"profile": "linear", "first": 0.5, "last": 1.0}]
    plan = plan_of(coverage=rules, strategy=strategy)
    for unit, holders in zip(plan.units, plan.holders, strict=True):
        layer = int(unit.name.split(".")[2])
        assert len(holders) == (3 if "attention" in unit.name else {0: 2, 1: 3, 2: 3, 3: 4}[layer]), unit.name
    assert plan_of(coverage=[{"units": "mlp", "coverage": 0.5}, {"coverage": 0.5}]).hash == plan_of(coverage=0.5).hash


def test_tensors_are_cut_only_where_somebody_lacks_a_part() -> None:
    for coverage, is_cut in ((1.0, False), (0.5, True)):
        pieces = pieces_by_tensor(dense_tensors(llama(4)), plan_of(coverage=coverage, strategy="neuron"))
        assert is_cut == any(piece.dim is not None for of_tensor in pieces.values() for piece, _ in of_tensor)


def test_layers_without_units_are_ends_too() -> None:
    """Of six layers the first and the last are shared: no other takes their place."""
    plan = plan_of(6, 6, coverage={"coverage": 0.5, "whole_ends": 2}, shared=[r"layers\.[05]\."])
    numbers = {int(unit.name.split(".")[2]): len(one) for unit, one in zip(plan.units, plan.holders, strict=True)}
    assert numbers == {1: 6, 2: 3, 3: 3, 4: 6}


def test_frozen_branches_are_no_units(tmp_path: Path) -> None:
    """Of a layer the rest is one, and so is a branch of which something is trained. A plan of the model before it was
    frozen, and a pattern of what is shared, may name them."""
    path = str(tmp_path / "plan.json")
    whole = plan_of(coverage=0.5, granularity="layer")
    whole.save(path)
    model: Any = llama(4)
    layer = model.model.layers[1]
    for module in (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp.up_proj):
        module.requires_grad_(False)
    plan, _ = plan_model(model, parsed(coverage=0.5, granularity="layer"), 4)
    assert [unit.name for unit in plan.units] == [unit.name for unit in whole.units]
    names = [{piece.parameter for piece in unit.pieces} for unit in plan.units]
    prefixes = ("model.layers.1.input_layernorm", "model.layers.1.self_attn")
    assert [name.startswith(prefixes) for name in names[1]] == [False] * 4
    assert [len(of_unit) for of_unit in names] == [9, 4, 9, 9]
    read, _ = plan_model(model, parsed(assignment=path), 4)
    assert (read.units, read.holders) == (plan.units, whole.holders)
    shared = r"layers\.1\.attention"
    for strategy in ("block", "neuron"):
        units = [plan_model(model, parsed(holders=2, strategy=strategy, shared=s), 4)[0].units for s in ([], [shared])]
        assert units[0] == units[1]
        assert not any("layers.1.attention" in unit.name for unit in units[0])
    model.model.layers.requires_grad_(False)
    for settings in ({"coverage": 0.5}, {"assignment": path}):
        with pytest.raises(ValueError, match="unfreeze"):
            plan_model(model, parsed(**settings), 4)


def test_ends_of_the_trained_model() -> None:
    """Not of its teacher; frozen layers in the stack are ends of it."""
    model: Any = nn.ModuleDict({"student": llama(4), "teacher": llama(4).requires_grad_(False)})
    model["student"].model.layers[0].requires_grad_(False)
    plan, _ = plan_model(model, parsed(coverage={"coverage": 0.5, "whole_ends": 1}), 4)
    numbers = {unit.name.split(".")[3]: len(one) for unit, one in zip(plan.units, plan.holders, strict=True)}
    assert numbers == {"1": 2, "2": 2, "3": 4}


def test_a_plan_by_path(tmp_path: Path) -> None:
    """Any table, for any number of ranks that its subnetworks divide."""
    path = str(tmp_path / "plan.json")
    mine = replace(plan_of(coverage=0.5), holders=((0, 1), (2, 3), (0, 3), (1, 2)) * 2)
    mine.save(path)
    assert plan_of(assignment=path) == mine
    assert plan_of(8, assignment=path) == replace(mine, subnetwork_of_rank=(0, 0, 1, 1, 2, 2, 3, 3))
    for settings, expected in (
        ({"regime": "backward"}, "regime is 'forward' in the plan and 'backward' here"),
        ({"strategy": "neuron"}, "strategy is 'block' in the plan and 'neuron' here"),
        ({"holders": 1}, "holders is 2 in the plan and 1 here"),
        ({"coverage": 1.0}, "holders is 2 in the plan and 4 here"),
        ({"subnetworks": 2}, "subnetworks is 4 in the plan and 2 here"),
    ):
        with pytest.raises(ValueError, match=expected):
            plan_of(assignment=path, **settings)
    with pytest.raises(ValueError, match="has 4 subnetworks, which do not divide the 6"):
        plan_of(6, assignment=path)
    with pytest.raises(ValueError, match="the model has no parameter named"):
        plan_of(4, 2, assignment=path)
    first, *others = mine.units
    piece, *rest = first.pieces
    replace(mine, units=(replace(first, pieces=(replace(piece, kind="buffer"), *rest)), *others)).save(path)
    with pytest.raises(ValueError, match="the model has no buffer named"):
        plan_of(assignment=path)


@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
def test_every_subnetwork_reaches_the_encoder_where_it_can(granularity: str) -> None:
    """Of two cross-attentions with two holders each, all of three subnetworks get one, whatever the seed."""
    model = ALL_SPECIMENS["bart"].build()
    for seed in range(8):
        plan, _ = plan_model(model, parsed(holders=2, seed=seed, granularity=granularity), 3)
        crossing = [i for i, unit in enumerate(plan.units) if any("encoder_attn" in p.parameter for p in unit.pieces)]
        assert {one for index in crossing for one in plan.holders[index]} == {0, 1, 2}, seed


def test_too_few_units() -> None:
    with pytest.raises(
        ValueError, match="the model: 4 units with 1 holders each cannot give each of 5 subnetworks one"
    ):
        plan_of(5, 2, holders=1)
    with pytest.raises(ValueError, match=r"branch 'model\.layers\.0\.mlp': 2 units with 1 holders each"):
        plan_of(4, 2, holders=1, strategy={"mlp": "neuron"}, neuron_groups=2)


def test_a_branch_whose_neurons_depend_on_each_other_is_replicated_with_a_warning() -> None:
    model: Any = llama(3)
    model.model.layers[1].mlp.act_fn = nn.Softmax(-1)
    plan, (first, *_) = plan_model(model, parsed(holders=1, strategy={"mlp": "neuron"}), 2)
    assert {unit.name.rpartition(".")[0] for unit in plan.units} == {"model.layers.0.mlp", "model.layers.2.mlp"}
    assert first.startswith("1 branches are replicated, such as 'model.layers.1.mlp': ")


def test_warnings_where_subnetworks_are_not_connected() -> None:
    assert plan_model(llama(4), parsed(coverage=0.5), 4)[1] == []
    for coverage in (0.5, [{"coverage": 0.5, "whole_ends": 1}]):  # ends that both hold connect them
        (one,) = plan_model(llama(4), parsed(coverage=coverage), 2)[1]
        assert "2 subnetworks: a unit below coverage 1 is trained by one of them alone" in one
    assert plan_model(llama(4), parsed(coverage=1.0), 2)[1] == []
    (one,) = plan_model(llama(4), parsed(holders=1), 4)[1]
    assert "8 units with 1 holders each do not connect 4 subnetworks" in one
