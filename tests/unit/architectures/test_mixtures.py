"""Mixtures of experts: what their units cost."""

from __future__ import annotations

import pytest

from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.strategies import unit_costs, units_of_branches
from tests.helpers.core_masks import families
from tests.helpers.mixtures import MIXTURES, mixture


@pytest.mark.parametrize("name", families(MIXTURES, ("qwen2_moe", "llama4", "gpt_oss")))
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
