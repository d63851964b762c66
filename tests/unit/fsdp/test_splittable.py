"""What cannot be split into pieces is refused, by name, before anything is changed."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers, registry
from tests.helpers import mixtures, models, more_models
from tests.helpers.masked_modules import build
from tests.helpers.split_models import overlapping_plan, split


def refusal(dense: Any, strategy: Any = "neuron") -> str:
    """The message; the model is as it was."""
    before = {name: value.clone() for name, value in dense.state_dict().items()}
    classes = [type(module) for module in dense.modules()]
    with pytest.raises(ValueError, match=r"FSDP2 cannot hold|forward method of its own") as caught:
        split(dense, overlapping_plan(dense, strategy), 1)
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())
    assert [type(module) for module in dense.modules()] == classes
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_mixtures_of_experts() -> None:
    dense: Any = mixtures.mixture("mixtral")
    message = refusal(dense, {"mlp": "neuron"})
    assert re.search(r"neurons or heads of 'model\.layers\.0\.mlp'.*mixture of experts; use \"block\".*'mlp'", message)
    split(dense, overlapping_plan(dense, {"attention": "neuron"}), 1)


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_bodies_of_several_modules(name: str) -> None:
    assert re.search(r"several modules do its work \(", refusal(more_models.SPECIMENS[name].build()))


@pytest.mark.parametrize("name", ["resnet", "resnet_bottleneck"])
def test_convolutions(name: str) -> None:
    message = refusal(more_models.SPECIMENS[name].build())
    assert re.search(r"convolution \(Conv2d\) is of channels.*\"block\" for the part 'convolution'", message)


def test_a_forward_of_its_own_that_a_copy_would_not_run() -> None:
    dense: Any = build("llama")
    mlp = dense.model.layers[0].mlp
    mlp.down_proj.forward = partial(nn.functional.linear, weight=mlp.down_proj.weight)
    assert "down_proj" in refusal(dense)


def test_a_body_with_something_of_the_name_of_its_pieces() -> None:
    dense: Any = build("llama")
    dense.model.layers[0].mlp.pieces = 3
    assert "'pieces'" in refusal(dense)


class Scaled(nn.Linear):
    """With a parameter that is no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


class Layer(nn.Module):
    """A layer with the body that a test gives it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(6), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(self.norm(x))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (nn.Sequential(nn.Linear(6, 10), nn.Tanh(), Scaled(10, 6)), r"its 2 \(Scaled\) has 'gain'.*cannot be added"),
        (nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.LayerNorm(6)), r"its 3 \(LayerNorm\).*shared"),
    ],
)
def test_layers_with_more_than_neurons(body: nn.Module, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    inner = InnerLayers((Cut("0", 0), Cut("2", 1, is_output=True)))
    architectures.register(Layer, Branch("mlp", norm="norm", body="ff", inner=inner))
    assert re.search(reason, refusal(nn.Sequential(Layer(body), Layer(deepcopy(body)))))


def test_what_everybody_holds_is_not_asked() -> None:
    """A mixture of which nobody lacks anything stays whole."""
    dense: Any = mixtures.mixture("mixtral")
    plan = overlapping_plan(dense, {"attention": "neuron"})
    module, branches = split(dense, plan, 1)
    assert {branch.name.rpartition(".")[2] for branch in branches} == {"attention"}
    assert models.loss_of(module, models.TOKENS).isfinite()
