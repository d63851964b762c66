"""Modules that somebody put into layers of families that the package describes: they are tried out."""

from __future__ import annotations

from copy import deepcopy
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from sdp_deepspeed.architectures import is_of_package, locate_branches
from tests.helpers import models
from tests.helpers.descriptions import check
from tests.helpers.masked_modules import (
    RANKS,
    assert_close,
    assert_held_gradients,
    assert_same_as_zeroed,
    build,
    held_pieces,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from tests.helpers.mixtures import MIXTURES, mixture
from tests.helpers.more_models import SPECIMENS


class NormedAttention(LlamaAttention):
    """What its heads add is divided by what all of them have together."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
        size = self.q_proj(hidden_states).norm(dim=-1, keepdim=True) + 1
        output, weights = super().forward(hidden_states, *args, **options)
        return output / size, weights


class SameMLP(LlamaMLP):
    """Runs the code of its class, as a fused kernel would."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x)
        return result


def llama_with(name: str, kind: type, *layers: int) -> Any:
    model: Any = models.llama()
    for index in layers:
        old = getattr(model.model.layers[index], name)
        old.__class__ = kind
    return model


@pytest.mark.parametrize("layers", [(0, 1), (1,)], ids=["all", "the second"])
def test_a_body_that_is_not_what_was_described_is_refused(layers: tuple[int, ...]) -> None:
    model = llama_with("self_attn", NormedAttention, *layers)
    words = rf"'model\.layers\.{layers[0]}' \(LlamaDecoderLayer\): .*'attention' computes something else"
    with pytest.raises(ValueError, match=words):
        check(model, "neuron")
    assert check(model) == [], "as a block it is what the description says"


def test_a_body_that_computes_the_same_passes() -> None:
    for strategy in ("block", "neuron"):
        assert check(llama_with("mlp", SameMLP, 0, 1), strategy) == []


def normed(self: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    size = self.q_proj(hidden_states).norm(dim=-1, keepdim=True) + 1
    output, weights = FORWARD(self, hidden_states, *args, **options)
    return output / size, weights


def kept(self: Any, *args: Any, **options: Any) -> Any:
    return FORWARD(self, *args, **options)


def same(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A kernel of somebody else's."""
    result: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
    return result


FORWARD = LlamaAttention.forward


def test_a_forward_that_replaces_that_of_a_class_is_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", same)
    model: Any = models.llama()
    assert not is_of_package(model.model.layers[0])
    assert check(model, "neuron") == []
    monkeypatch.setattr(LlamaAttention, "forward", normed)
    with pytest.raises(ValueError, match=r"'model\.layers\.0' .*'attention' computes something else"):
        check(model, "neuron")


def test_a_forward_that_is_bound_to_a_module_is_tried_out() -> None:
    """Each that differs, where another one is right."""
    model: Any = models.llama()
    first, attention = (layer.self_attn for layer in model.model.layers)
    first.forward = MethodType(kept, first)
    assert check(model, "neuron") == []
    attention.forward = MethodType(normed, attention)
    with pytest.raises(ValueError, match=r"'model\.layers\.1' .*'attention' computes something else"):
        check(model, "neuron")
    assert check(model) == []
    assert "forward" in vars(attention), "a trial changes nothing"


@pytest.mark.parametrize("rank", RANKS)
def test_a_bound_forward_that_computes_the_same_runs_in_all_modes(rank: int) -> None:
    """A worker's part has it too, and what is lacking does not run."""
    dense: Any = build("llama", num_layers=2)
    calls = []

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return same(self, x)

    for layer in dense.model.layers:
        layer.mlp.forward = MethodType(counted, layer.mlp)
    for strategy, forward, backward in (("block", 2 * rank, 2), ("neuron", 2, 4)):  # worker 1 has both MLPs
        assert check(dense, strategy) == []
        plan = plan_of(dense, strategy=strategy)
        assert_same_as_zeroed(dense, plan, rank)
        calls.clear()
        masked(dense, plan, rank)[0](tokens())
        assert len(calls) == forward
        plan = plan_of(dense, "backward", strategy)
        expected_loss, expected = loss_and_gradients(deepcopy(dense), tokens())
        module, mask = masked(dense, plan, rank)
        calls.clear()
        loss, gradients = loss_and_gradients(module, tokens())
        assert len(calls) == backward
        assert_close(loss, expected_loss)
        assert_held_gradients(mask, held_pieces(dense, plan, rank), gradients, expected)


def test_a_body_that_does_not_say_which_form_it_has_is_refused_by_name() -> None:
    """StableLM's description asks its attention whether it has a norm for each head."""
    model = SPECIMENS["stablelm"].build()
    layer = model.get_submodule("model.layers.1")
    layer.self_attn = nn.Identity()
    words = r"'model\.layers\.1': .* StableLmDecoderLayer asks .*`when`.* no attribute 'qk_layernorm'.*register\("
    with pytest.raises(ValueError, match=f"(?s){words}"):
        locate_branches(model)


@pytest.mark.parametrize("name", [*SPECIMENS, *MIXTURES])
def test_families_as_they_are_need_no_trial(name: str) -> None:
    model = mixture(name) if name in MIXTURES else SPECIMENS[name].build()
    assert all(is_of_package(model.get_submodule(branch.layer)) for branch in locate_branches(model))
