"""Every described family: what of it is in units; and models of users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, locate_branches, registry, unit_costs, units_of_branches
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.description import check_description
from sdp_deepspeed.plan.plan import Plan
from tests.helpers import models
from tests.helpers.more_models import SPECIMENS, UNCUT

NUM_LAYERS = 3


@pytest.mark.parametrize("family", models.FAMILIES)
def test_units_are_all_of_the_layers(family: str) -> None:
    model = models.family(family, NUM_LAYERS)
    branches = locate_branches(model)
    inside = {piece.parameter for branch in branches for piece in branch.pieces}
    layers = {name for name, _ in model.named_parameters() if any(part.isdigit() for part in name.split("."))}
    assert inside == layers
    assert len(units_of_branches(branches)) == 2 * NUM_LAYERS
    assert len(units_of_branches(branches, granularity="layer")) == NUM_LAYERS


@pytest.mark.parametrize("name", SPECIMENS)
def test_what_is_in_no_unit_of_the_other_families_is_a_norm(name: str) -> None:
    model = SPECIMENS[name].build()
    branches = locate_branches(model)
    parts = [branch.description.name for branch in branches if branch.is_bypassed]
    num_blocks = SPECIMENS[name].num_blocks or {True: 13, False: 4}["cross_attention" in parts]
    assert len(units_of_branches(branches)) == len(parts) == num_blocks
    inside = {piece.parameter for branch in branches for piece in branch.pieces}
    shared = {key for key, _ in model.named_parameters() if any(part.isdigit() for part in key.split("."))} - inside
    # T5's first self-attention makes a bias that all layers need. GPT-J's norm is of both branches. ResNet's
    # projections, and its head. What joins the patches of a vision tower.
    others = [".ln_1.", "merger"]
    others += ["block.0.layer.0.", "downsample.reduction.", "downsampling_layer.", ".shortcut.", "classifier."]
    assert all("norm" in key.lower() or any(other in key for other in others) for key in shared), shared


@pytest.mark.parametrize("name", UNCUT)
def test_heads_that_cannot_be_cut_are_refused_with_the_line_that_works(name: str) -> None:
    words = r'attention.* cannot be cut: .*"strategy": \{"attention": "block", "mlp": "neuron"\}'
    with pytest.raises(ValueError, match=words):
        units_of_branches(locate_branches(SPECIMENS[name].build()), strategy="neuron")


class OwnBranch(nn.Module):
    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale


class OwnLayer(nn.Module):
    """`x + drop(body(norm(x)))`, twice, with words of its own."""

    ff: OwnBranch

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.mix, self.drop = nn.LayerNorm(width), OwnBranch(width), nn.Dropout(0.0)
        self.then, self.ff = nn.LayerNorm(width), OwnBranch(width)
        self.gain = nn.Parameter(torch.ones(width))  # in no branch: shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.mix(self.before(x)))
        return self.gain * (x + self.ff(self.then(x)))


class OwnModel(nn.Module):
    layers: Any

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(OwnLayer(5) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def own_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    architectures.register(
        OwnLayer, Branch("mixer", norm="before", body="mix", after=("drop",)), Branch("mlp", norm="then", body="ff")
    )


@pytest.mark.usefixtures("own_description")
def test_a_users_model() -> None:
    model = OwnModel()
    assert check_description(model, torch.randn(2, 5)) == ["forward x block", "backward x block"]
    units = units_of_branches(locate_branches(model))
    assert {piece.kind for unit in units for piece in unit.pieces} == {"parameter", "buffer"}
    plan = Plan("forward", "block", 2, 1, 0, tuple(units), ((0,), (1,)) * NUM_LAYERS, (0, 1))
    mask = Mask(model, plan, 0)
    mask.apply()
    for name, pieces in mask.buffer_pieces.items():
        assert (mask.buffers[name].untyped_storage().nbytes() > 0) == mask.is_held(pieces[0][0])


@pytest.mark.usefixtures("own_description")
def test_what_cannot_be_described_is_refused() -> None:
    model = OwnModel()
    model.layers[1].ff.linear.weight = model.layers[0].ff.linear.weight
    with pytest.raises(ValueError, match=r"layers\.1\.ff\.linear\.weight.*same tensor.*layers\.0\.mlp.*untie"):
        locate_branches(model)
    model = OwnModel()
    for layer in model.layers:
        layer.ff.register_buffer("scale", model.layers[0].ff.scale)
    with pytest.raises(ValueError, match=r"layers\.1\.ff\.scale.*same tensor"):
        locate_branches(model)
    architectures.register(OwnLayer, Branch("mlp", norm="then", body="feed_forward"))
    with pytest.raises(ValueError, match=r"no submodule 'feed_forward'.*'mlp'.*'ff'"):
        locate_branches(OwnModel())
    with pytest.raises(ValueError, match="different names"):
        architectures.register(OwnLayer, Branch("mlp", "then", "ff"), Branch("mlp", "before", "mix"))
    with pytest.raises(ValueError, match="expected one or more"):
        architectures.register(OwnLayer)


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"(?s)OwnModel has no layer.*\.architectures import .*LlamaDecoderLayer"):
        locate_branches(OwnModel())


def test_a_subclass_of_a_described_layer_is_described() -> None:
    class Mine(LlamaDecoderLayer):
        pass

    assert architectures.branches_of(Mine) == architectures.branches_of(LlamaDecoderLayer)
    assert architectures.branches_of(nn.Linear) is None


def test_shared_patterns() -> None:
    model = models.llama(NUM_LAYERS)
    patterns = (r"layers\.0\.", r"layers\.2\.(mlp|post_attention)")
    units = units_of_branches(locate_branches(model), shared=patterns)
    assert [unit.name for unit in units] == [
        "model.layers.1.attention",
        "model.layers.1.mlp",
        "model.layers.2.attention",
    ]
    with pytest.raises(ValueError, match=r"shared: .*layers.* matches no parameter of any unit"):
        units_of_branches(locate_branches(model), shared=(r"layers\.9",))
    with pytest.raises(ValueError, match=r"'q_proj' matches only a part of 'model\.layers\.0\.attention'"):
        units_of_branches(locate_branches(model), shared=("q_proj",))


def test_costs_of_a_llama() -> None:
    model = models.llama()
    units = units_of_branches(locate_branches(model), granularity="sublayer", shared=())
    attention, mlp, *_ = unit_costs(model, units)
    # hidden 16, 4 heads and 2 key/value heads of 4, inner width 24; a norm has 16 weights and counts no FLOPs
    assert (attention.num_parameters, attention.flops) == (16 * (16 + 8 + 8 + 16) + 16, 2 * 16 * (16 + 8 + 8 + 16))
    assert (mlp.num_parameters, mlp.flops) == (3 * 16 * 24 + 16, 2 * 3 * 16 * 24)
    assert attention.num_bytes == 4 * attention.num_parameters
