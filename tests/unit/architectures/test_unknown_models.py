"""A model without branches is refused with the lines that describe one; descriptions that cannot be."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import sdp_deepspeed
from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers.hand_written import Adds
from tests.helpers.models import llama

pytestmark = pytest.mark.usefixtures("own_descriptions")


class Unadded(nn.Module):
    """A repeated layer that adds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(self.norm(x))


def test_a_model_without_branches_is_refused_with_four_lines_that_describe_one() -> None:
    model = nn.Sequential(Unadded(), Unadded())
    sdp_deepspeed.trace(model, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="Sequential has no residual branch") as error:
        proven_branches(model, "neuron")
    message = str(error.value)
    lines = message[message.index("from sdp_deepspeed") :].split("\n")[:4]
    assert lines[0] == "from sdp_deepspeed.architectures import Branch, register"
    assert re.fullmatch(r'register\(".*Unadded",', lines[1])
    exec("\n".join(lines))  # what is written is Python; and not taken as it is
    with pytest.raises(ValueError, match=r"has no submodule 'NORM'"):
        proven_branches(model, "neuron")


class Layer(Adds):
    def __init__(self) -> None:
        super().__init__(norm=nn.LayerNorm(4), ff=nn.Linear(4, 4))


class PostNorm(Layer):
    norm: nn.Module
    ff: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.ff(x))


def test_a_description_is_of_what_inherits_the_forward() -> None:
    described = Branch("mlp", norm="norm", body="ff")
    architectures.register(Adds, described)
    other_modules = Adds(norm=nn.LayerNorm(4), ff=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    model = nn.Sequential(Layer(), other_modules)
    assert [branch.description for branch in proven_branches(model, "neuron")] == [described] * 2
    model = nn.Sequential(PostNorm(), PostNorm())
    sdp_deepspeed.trace(model, torch.zeros(2, 4))
    (first, _) = proven_branches(model)
    assert (first.description.norm, first.description.body) == (None, "ff")


def test_a_model_that_is_a_layer_is_refused() -> None:
    architectures.register(Layer, Branch("mlp", norm="norm", body="ff"))
    with pytest.raises(ValueError, match=r"the class of the model itself, Layer, is described.*Sequential"):
        proven_branches(Layer(), "neuron")


def test_what_two_branches_use_is_shared() -> None:
    model: Any = llama()
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    inside = {piece.parameter for branch in proven_branches(model) for piece in branch.pieces}
    assert not any("up_proj" in name for name in inside)
    assert "model.layers.1.mlp.gate_proj.weight" in inside


def test_what_cannot_be_described_is_refused() -> None:
    model: Any = llama()
    scale = torch.ones(16)
    for layer in model.model.layers:
        layer.mlp.register_buffer("scale", scale)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.scale.*same tensor"):
        proven_branches(model)
    model = llama()
    model.first_norm = model.model.layers[0].input_layernorm
    with pytest.raises(ValueError, match=r"'first_norm\.weight' is the same tensor.*use separate modules"):
        proven_branches(model)
    architectures.register(LlamaDecoderLayer, Branch("mlp", norm="input_layernorm", body="feed_forward"))
    with pytest.raises(ValueError, match=r"no submodule 'feed_forward'.*'mlp'"):
        proven_branches(llama())
    for name in ("scale", "training"):
        architectures.register(LlamaDecoderLayer, Branch("mlp", body="mlp", parameters=(name,)))
        with pytest.raises(ValueError, match=rf"layers\.0 .* has no parameter '{name}', .*its own are \[\]"):
            proven_branches(llama())
    with pytest.raises(ValueError, match="different names"):
        architectures.register(LlamaDecoderLayer, Branch("mlp", body="mlp"), Branch("mlp", body="self_attn"))
    with pytest.raises(ValueError, match="expected one or more"):
        architectures.register(LlamaDecoderLayer)


def test_what_no_description_can_be() -> None:
    with pytest.raises(ValueError, match="'mlp': body: name the submodule"):
        Branch("mlp", norm="norm")
    with pytest.raises(ValueError, match=r"'ff\.dropout' is named twice, or inside another"):
        Branch("mlp", body="ff", after=("ff.dropout",))
    with pytest.raises(ValueError, match="'ff' is named twice"):
        Branch("mlp", body=("ff", "act"), after=("ff",))
