"""Mixtures of experts: which of their tensors units take, and what they cost."""

from __future__ import annotations

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.strategies import unit_costs, units_of_branches
from sdp_deepspeed.planner import plan_model
from sdp_deepspeed.units import check_pieces
from tests.helpers.mixtures import CUT_EVERYWHERE, MIXTURES, mixture


@pytest.mark.parametrize("name", CUT_EVERYWHERE)
def test_units_part_experts_and_leave_routers_shared(name: str) -> None:
    model = mixture(name)
    tensors = dict(model.named_parameters())
    units = units_of_branches(proven_branches(model, "neuron"), strategy="neuron", neuron_groups=2)
    check_pieces(units, lambda piece: tuple(tensors[piece.parameter].shape))
    counts: dict[str, int] = {}
    for piece in (piece for unit in units for piece in unit.pieces):
        counts[piece.parameter] = counts.get(piece.parameter, 0) + piece.num_elements(tensors[piece.parameter].shape)
    assert counts == {key: tensors[key].numel() for key in counts}
    cut = [piece for unit in units for piece in unit.pieces if ".experts." in piece.parameter]
    if name != "llama4":  # which runs all experts, in another product
        assert all(piece.start % 4 == piece.length % 4 == 0 for piece in cut), "as grouped products of fp32 need"
    layers = {key for key in tensors if ".layers." in key}
    shared = {key.split(".layers.")[1].split(".", 1)[1] for key in layers - counts.keys()}
    kinds = ("norm", "gate.weight", "router", "_a_proj", "o_proj.bias", "experts.down_proj_bias")  # latent vectors too
    assert all(any(kind in key for kind in kinds) for key in shared), shared
    assert any(key.endswith(("gate.weight", "router.weight")) for key in shared)


def test_a_norm_over_all_heads_leaves_attention_to_blocks() -> None:
    model = mixture("olmoe")
    with pytest.raises(ValueError, match=r"layers\.0\.attention' cannot be cut.*\"block\" for the type 'attention'"):
        units_of_branches(proven_branches(model, "neuron"), strategy="neuron", neuron_groups=2)


@pytest.mark.parametrize("name", MIXTURES)
def test_costs_count_the_experts_that_a_token_uses(name: str) -> None:
    """Of routed experts half of the FLOPs (2 of 4), and all of the bytes. Llama 4 runs them all."""
    model = mixture(name)
    tensors = dict(model.named_parameters())
    units = units_of_branches(proven_branches(model, "neuron"), granularity="sublayer")
    for unit, cost in zip(units, unit_costs(model, units), strict=True):
        own = {piece.parameter: tensors[piece.parameter] for piece in unit.pieces if piece.kind == "parameter"}
        routed = {key: tensor for key, tensor in own.items() if ".experts." in key}
        matrices = sum(t.numel() for key, t in own.items() if t.dim() >= 2 and key not in routed)
        num_used = 2 if name == "llama4" else 1
        assert cost.flops == 2 * matrices + num_used * sum(t.numel() for t in routed.values() if t.dim() == 3)
        assert cost.num_parameters == sum(t.numel() for t in own.values())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_costs_do_not_depend_on_how_experts_are_computed(implementation: str) -> None:
    costs = []
    for name in ("grouped_mm", implementation):
        model = mixture("mixtral")
        model.set_experts_implementation(name)
        costs.append(unit_costs(model, units_of_branches(proven_branches(model))))
    assert costs[0] == costs[1]


def test_workers_of_mixed_layers_are_balanced_by_what_they_compute() -> None:
    """DeepSeek's dense layers cost as much as its sparse ones with five times the weights."""
    model = mixture("deepseek_v3", first_k_dense_replace=2, num_hidden_layers=4, num_experts_per_tok=1, topk_group=1)
    config = parse({KEY: {"holders": 1}})
    assert config is not None
    plan, _ = plan_model(model, config, 2)
    costs = unit_costs(model, plan.units)
    loads = [sum(costs[unit].flops for unit in plan.units_of(subnetwork)) for subnetwork in (0, 1)]
    assert max(loads) <= 1.05 * sum(loads) / 2
