"""What is in units, what cannot be, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.strategies import units_of_branches
from tests.helpers import models
from tests.helpers.more_models import SPECIMENS, UNCUT

NUM_LAYERS = 3


@pytest.mark.parametrize("name", UNCUT)
def test_heads_that_cannot_be_cut_are_refused_with_the_line_that_works(name: str) -> None:
    words = r'attention.* cannot be cut: .*"strategy": \{"attention": "block", "mlp": "neuron"\}'
    with pytest.raises(ValueError, match=words):
        units_of_branches(proven_branches(SPECIMENS[name].build(), "neuron"), strategy="neuron")


def test_what_two_branches_use_is_shared() -> None:
    model: Any = models.llama()
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    inside = {piece.parameter for branch in proven_branches(model) for piece in branch.pieces}
    assert not any("up_proj" in name for name in inside)
    assert "model.layers.1.mlp.gate_proj.weight" in inside


@pytest.mark.usefixtures("own_descriptions")
def test_what_cannot_be_described_is_refused() -> None:
    model: Any = models.llama()
    scale = torch.ones(16)
    for layer in model.model.layers:
        layer.mlp.register_buffer("scale", scale)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.scale.*same tensor"):
        proven_branches(model)
    model = models.llama()
    model.first_norm = model.model.layers[0].input_layernorm
    with pytest.raises(ValueError, match=r"'first_norm\.weight' is the same tensor.*use separate modules"):
        proven_branches(model)
    architectures.register(LlamaDecoderLayer, Branch("mlp", norm="input_layernorm", body="feed_forward"))
    with pytest.raises(ValueError, match=r"no submodule 'feed_forward'.*'mlp'"):
        proven_branches(models.llama())
    with pytest.raises(ValueError, match="different names"):
        architectures.register(LlamaDecoderLayer, Branch("mlp", body="mlp"), Branch("mlp", body="self_attn"))
    with pytest.raises(ValueError, match="expected one or more"):
        architectures.register(LlamaDecoderLayer)


def test_shared_patterns() -> None:
    model = models.llama(NUM_LAYERS)
    patterns = (r"layers\.0\.", r"layers\.2\.(mlp|post_attention)")
    units = units_of_branches(proven_branches(model, "neuron"), shared=patterns)
    assert [unit.name for unit in units] == [
        "model.layers.1.attention",
        "model.layers.1.mlp",
        "model.layers.2.attention",
    ]
