"""Layers with modules that a user put into them, branches without parameters, and a model that is a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.core_masks import assert_masked, build, mask_of, plan_of


class Adapter(nn.Module):
    """A linear layer with a correction of rank 2, as LoRA wraps it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("strategy", ["block", "neuron", {"attention": "block", "mlp": "neuron"}])
def test_layers_with_adapters(strategy: Any) -> None:
    torch.manual_seed(0)
    model: Any = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    for regime in ("forward", "backward"):
        assert_masked(model, plan_of(model, regime, strategy), 1)


class PoolingLayer(nn.Module):
    """The second branch has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pool = nn.Linear(8, 8), nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        return x + self.pool(x)


@pytest.fixture
def described(own_descriptions: None) -> None:
    linear, pool = architectures.Branch("mlp", body="linear"), architectures.Branch("pool", body="pool")
    architectures.register(PoolingLayer, linear, pool)


@pytest.mark.usefixtures("described")
def test_a_branch_without_parameters_is_on_all_ranks() -> None:
    layers: list[Any] = [PoolingLayer() for _ in range(4)]
    model = nn.Sequential(*layers)
    plan = plan_of(model, "forward", "block")
    assert [unit.name for unit in plan.units] == [f"{index}.mlp" for index in range(4)]
    mask, x = mask_of(model, plan, 0), torch.randn(2, 8)
    absent = [index for index in range(4) if not plan.holds_rank(index, 0)]
    assert absent
    mask.apply()
    expected = x
    for index, layer in enumerate(layers):
        inner = expected if index in absent else expected + layer.linear(expected)
        expected = inner + layer.pool(inner)
    assert torch.equal(model(x), expected)


@pytest.mark.usefixtures("described")
def test_a_model_that_is_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the class of the model itself, PoolingLayer, is described.*Sequential"):
        proven_branches(PoolingLayer(), "neuron")
    assert proven_branches(nn.Sequential(PoolingLayer()), "neuron")
