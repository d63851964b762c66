"""Layers of described classes with other modules inside: only what the neuron strategy cuts must be as described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import registry, units_of_branches
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.core_masks import assert_masked, build, plan_of, planned


class Experts(nn.Module):
    """Two MLPs, weighted by a router."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = nn.Linear(config.hidden_size, 2, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class SparseLayer(LlamaDecoderLayer):
    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp = Experts(config)


class Adapter(nn.Module):
    """A linear layer with a correction of rank 2, as LoRA wraps it."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, base_layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def with_experts() -> nn.Module:
    model: Any = build("llama")
    model.model.layers = nn.ModuleList(SparseLayer(model.config, index) for index in range(2))
    return model


def with_adapters() -> nn.Module:
    model: Any = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
    return model


def with_heads_that_do_not_divide() -> nn.Module:
    """2 key/value heads of 4, of which the config says that they are 3."""
    model: Any = build("llama")
    model.config.num_key_value_heads = 3
    return model


def with_heads_of_no_number(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """The description looks for it elsewhere."""
    attention, mlp = architectures.branches_of(LlamaDecoderLayer) or ()
    assert attention.inner is not None
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    attention = replace(attention, inner=replace(attention.inner, heads="config.num_groups"))
    architectures.register(LlamaDecoderLayer, attention, mlp)
    return build("llama")


Maker = Callable[[], nn.Module]
PARTS: list[tuple[Maker, str, str, str]] = [
    (with_experts, "mlp", "attention", "gate_proj"),
    (with_adapters, "attention", "mlp", r"self_attn\.q_proj has no weight of its own \(a Adapter\)"),
    (with_heads_that_do_not_divide, "attention", "mlp", r"q_proj\.weight has 32 indices along dim 0.*3"),
]


@pytest.mark.parametrize(("make", "part", "other", "reason"), PARTS)
def test_blocks_work(make: Maker, part: str, other: str, reason: str) -> None:
    """Alone, and beside neurons of the part that is as described."""
    torch.manual_seed(0)
    model = make()
    names = [f"model.layers.{index}.{branch}" for index in (0, 1) for branch in ("attention", "mlp")]
    assert [unit.name for unit in units_of_branches(proven_branches(model, "neuron"))] == names
    for strategy in ("block", {part: "block", other: "neuron"}, {other: "neuron"}):
        assert_masked(model, plan_of(model, "forward", strategy), 1)


def assert_neurons_are_refused(model: nn.Module, part: str, reason: str) -> None:
    """By its unit's name, with the reason and the way out."""
    for strategy in ("neuron", {part: "neuron"}):
        block = parse({KEY: {"holders": 1, "strategy": strategy}})
        assert block is not None
        words = rf"'model\.layers\.0\.{part}' cannot be cut: .*{reason}.*Use \"block\" for the type '{part}'"
        with pytest.raises(ValueError, match=words):
            planned(model, block, 2)


@pytest.mark.parametrize(("make", "part", "other", "reason"), PARTS)
def test_neurons_are_refused(make: Maker, part: str, other: str, reason: str) -> None:
    assert_neurons_are_refused(make(), part, reason)


def test_a_number_of_heads_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_heads_of_no_number(monkeypatch)
    assert len(plan_of(model, "forward", "block").units) == 4
    assert_neurons_are_refused(model, "attention", "num_groups")


class PoolingLayer(nn.Module):
    """The second branch has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pool = nn.Linear(8, 8), nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.linear(x)
        return x + self.pool(x)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    linear, pool = architectures.Branch("mlp", body="linear"), architectures.Branch("pool", body="pool")
    architectures.register(PoolingLayer, linear, pool)


@pytest.mark.usefixtures("described")
def test_a_branch_without_parameters_is_on_all_ranks() -> None:
    layers: list[Any] = [PoolingLayer() for _ in range(4)]
    model = nn.Sequential(*layers)
    plan = plan_of(model, "forward", "block")
    assert [unit.name for unit in plan.units] == [f"{index}.mlp" for index in range(4)]
    mask, x = Mask(model, plan, 0), torch.randn(2, 8)
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
    with pytest.raises(ValueError, match=r"the model itself is of the described class .*PoolingLayer.*Sequential"):
        proven_branches(PoolingLayer(), "neuron")
    assert proven_branches(nn.Sequential(PoolingLayer()), "neuron")
