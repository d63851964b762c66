"""Branches of large models are proven on a copy with a narrow residual stream, with the same results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from sdp_deepspeed.architectures import derivation, narrow
from sdp_deepspeed.architectures.derivation import derivation_of
from sdp_deepspeed.masking.proof import proven_branches, replicated_layers, with_proven_cells
from tests.helpers.core_masks import families
from tests.helpers.models import llama
from tests.helpers.oracle_grid import MODELS

OF_SEVERAL_WIDTHS = {"convnext", "resnet", "resnet_bottleneck"}
WITH_TINY_TABLES = {"gpt_neox_parallel"}  # of rotary embeddings


pytestmark = pytest.mark.usefixtures("nothing_is_known")


@pytest.fixture
def none_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "_LARGE", 0)
    monkeypatch.setattr(narrow, "_MIN_WIDTH", 4)


def is_narrow(model: nn.Module) -> bool:
    found = derivation_of(model)
    return all(found.replays[layer][0] is not traced for layer, (traced, _) in found.passes.items())


def findings(model: nn.Module) -> tuple[object, ...]:
    branches = with_proven_cells(model, proven_branches(model), "neuron")
    return branches, replicated_layers(model)


@pytest.mark.parametrize("name", families(MODELS, ("llama", "gpt2", "falcon_grouped", "bloom")))
def test_a_narrow_copy_has_the_same_branches_and_cells(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = findings(MODELS[name].build())
    monkeypatch.setattr(narrow, "_LARGE", 0)
    monkeypatch.setattr(narrow, "_MIN_WIDTH", 4)
    monkeypatch.setattr(derivation, "_OF_MODELS_LIKE", {})
    model: Any = MODELS[name].build()
    before = copy.deepcopy(model.config.to_dict()), torch.get_rng_state(), torch.get_default_dtype()
    assert findings(model) == expected
    assert is_narrow(model) == (name not in OF_SEVERAL_WIDTHS | WITH_TINY_TABLES)
    assert model.config.to_dict() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_default_dtype() == before[2]


@pytest.mark.usefixtures("none_is_too_small")
def test_a_copy_whose_zeros_have_another_shape_does_not_stand_for_a_model() -> None:
    """As many neurons as the narrow stream has features: zeros of one module would have the shape of its input."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = hf.BioGptForCausalLM(hf.BioGptConfig(**sizes, vocab_size=100))
    assert len(proven_branches(model)) == 2
    ((layer, (replayed, *_)),) = derivation_of(model).replays.items()
    assert replayed.model.get_parameter(f"{layer}.fc1.weight").shape != (24, 24)


def test_a_copy_with_fewer_neurons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1032, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = hf.LlamaConfig(**sizes, vocab_size=1000, num_hidden_layers=1)
    expected = findings(hf.LlamaForCausalLM(config))
    monkeypatch.setattr(narrow, "_LARGE", 0)
    monkeypatch.setattr(derivation, "_OF_MODELS_LIKE", {})
    model = hf.LlamaForCausalLM(config)
    assert findings(model) == expected
    (layer,) = derivation_of(model).replays
    replayed, *_ = derivation_of(model).replays[layer]
    assert replayed.model.get_parameter(f"{layer}.mlp.up_proj.weight").shape == (129, 24)


@pytest.mark.parametrize(
    ("build", "cells"),
    [
        (
            lambda: hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2},
                    **{"num_attention_heads": 64, "num_key_value_heads": 8},
                )
            ),
            [8, 28672] * 2,
        ),
        (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=12288, n_head=96, n_layer=2)), [96, 49152] * 2),
    ],
)
def test_layers_larger_than_memory(build: Callable[[], nn.Module], cells: list[int]) -> None:
    with torch.device("meta"):
        model = build().bfloat16()
    branches = with_proven_cells(model, proven_branches(model), "neuron")
    assert [branch.num_cells for branch in branches] == cells


class ByNumber(LlamaMLP):
    """With a number that no constructor sets."""

    shift = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


class OtherMLP(ByNumber):
    shift = 1


def by_shapes(mlp: Any) -> None:
    mlp.gate_proj, mlp.up_proj = (nn.Linear(16, 40, bias=False) for _ in range(2))
    mlp.down_proj = nn.Linear(40, 16, bias=False)


ALL_BUT_ONE = ["0.attention", "0.mlp", "1.attention"]
CHANGES: dict[str, tuple[Callable[[Any], object], list[str]]] = {
    "attribute": (lambda mlp: setattr(mlp, "shift", 1), ALL_BUT_ONE),
    "class": (lambda mlp: setattr(mlp, "__class__", OtherMLP), ALL_BUT_ONE),
    "forward": (lambda mlp: setattr(mlp, "forward", lambda x: LlamaMLP.forward(mlp, x) + 1), ALL_BUT_ONE),
    # It runs around an absent module, too.
    "hook": (lambda mlp: mlp.register_forward_hook(lambda _, given, output: output + 1), [*ALL_BUT_ONE, "1.mlp"]),
    "shapes": (by_shapes, [*ALL_BUT_ONE, "1.mlp"]),
}


@pytest.mark.usefixtures("none_is_too_small")
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_not_proven_by_a_copy_without_the_change(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "attribute":
        monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP", ByNumber)
    model: Any = llama()
    change, expected = CHANGES[name]
    change(model.model.layers[1].mlp)
    assert [branch.name.removeprefix("model.layers.") for branch in proven_branches(model)] == expected
    assert is_narrow(model) == (name in ("attribute", "hook"))


@pytest.mark.usefixtures("none_is_too_small")
@pytest.mark.parametrize(
    "shift", [lambda width: width == 16, lambda width: width // 16, lambda width: (16 / width) // 1]
)
def test_code_that_depends_on_the_width_is_not_proven_by_another_width(
    shift: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x) + shift(self.hidden_size)

    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", forward)
    names = {branch.description.name for branch in proven_branches(llama())}
    assert names == {"attention"}


@pytest.mark.usefixtures("none_is_too_small")
def test_settings_of_a_model_are_those_of_its_narrow_copy() -> None:
    model: Any = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert len(proven_branches(model)) == 4
    assert is_narrow(model)
