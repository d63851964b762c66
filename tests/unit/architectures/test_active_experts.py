"""What experts cost that are modules in a list, and experts of which that is not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Experts, locate_branches, registry, unit_costs, units_of_branches
from tests.helpers.own_layers import GPT, Block, GatedMLP, attention_of


class Gate(nn.Linear):
    top_k = 2


class Mixture(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate, self.experts = Gate(width, 4), nn.ModuleList(GatedMLP(width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        shares = self.gate(x).softmax(-1)
        return sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class MixtureBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp: Any = Mixture()


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))


def model_with(module: str) -> nn.Module:
    experts = Experts(module, "gate", "gate.top_k")
    architectures.register(MixtureBlock, attention_of(), Branch("mlp", norm="ln_2", body="mlp", experts=experts))
    return GPT(MixtureBlock)


def test_experts_in_a_list_cost_what_a_token_uses() -> None:
    """Two of four; biases cost nothing, and a router what it weighs."""
    model: Any = model_with("experts")
    units = units_of_branches(locate_branches(model))
    cost = next(c for unit, c in zip(units, unit_costs(model, units), strict=True) if unit.name == "h.0.mlp")
    expert = sum(p.numel() for p in GatedMLP(16).parameters() if p.dim() > 1)
    assert cost.flops == 2 * (2 * expert + model.h[0].mlp.gate.weight.numel())


def test_experts_that_are_neither_a_list_nor_stacked_are_refused() -> None:
    model = model_with("experts.0")
    with pytest.raises(ValueError, match=r"'h\.0\.mlp\.experts\.0': Experts: no parameter has shape"):
        unit_costs(model, units_of_branches(locate_branches(model)))
