"""A model without branches is refused with the lines that describe one; descriptions that cannot be."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import sdp_deepspeed
from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch
from sdp_deepspeed.masking.proof import proven_branches

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


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.ff(self.norm(x))


class OtherModules(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))  # type: ignore[assignment]


class PostNorm(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.ff(x))


def test_a_description_is_of_what_inherits_the_forward() -> None:
    described = Branch("mlp", norm="norm", body="ff")
    architectures.register(Layer, described)
    model = nn.Sequential(Layer(), OtherModules())
    assert [branch.description for branch in proven_branches(model, "neuron")] == [described] * 2
    model = nn.Sequential(PostNorm(), PostNorm())
    sdp_deepspeed.trace(model, torch.zeros(2, 4))
    (first, _) = proven_branches(model)
    assert (first.description.norm, first.description.body) == (None, "ff")


def test_a_model_that_is_a_layer_is_refused() -> None:
    architectures.register(Layer, Branch("mlp", norm="norm", body="ff"))
    with pytest.raises(ValueError, match=r"the class of the model itself, Layer, is described.*Sequential"):
        proven_branches(Layer(), "neuron")


def test_what_no_description_can_be() -> None:
    with pytest.raises(ValueError, match="'mlp': body: name the submodule"):
        Branch("mlp", norm="norm")
    with pytest.raises(ValueError, match=r"'ff\.dropout' is named twice, or inside another"):
        Branch("mlp", body="ff", after=("ff.dropout",))
    with pytest.raises(ValueError, match="'ff' is named twice"):
        Branch("mlp", body=("ff", "act"), after=("ff",))
