"""What experts cost that are modules in a list, and experts of which that is not known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Experts, locate_branches, registry, unit_costs, units_of_branches


class Gate(nn.Linear):
    top_k = 2


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = Gate(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.gate(x).softmax(-1)
        return torch.stack([shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts)]).sum(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), Mixture()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.mlp(self.norm(x))
        return result


def model_with(module: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    experts = Experts(module, "gate", "gate.top_k")
    architectures.register(Layer, Branch("mlp", norm="norm", body="mlp", experts=experts))
    return nn.Sequential(Layer(), Layer())


def test_experts_in_a_list_cost_what_a_token_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four; biases cost nothing, and a router what it weighs."""
    model = model_with("experts", monkeypatch)
    costs = unit_costs(model, units_of_branches(locate_branches(model)))
    assert [cost.flops for cost in costs] == [2 * (2 * 16 * 16 + 16 * 4)] * 2


def test_experts_that_are_neither_a_list_nor_stacked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with("experts.0", monkeypatch)
    with pytest.raises(ValueError, match=r"'0\.mlp\.experts\.0': Experts: no parameter has shape"):
        unit_costs(model, units_of_branches(locate_branches(model)))
