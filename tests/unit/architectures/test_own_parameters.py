"""A branch of several modules before its body, and of parameters that are the layer's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers
from sdp_deepspeed.masking.check_description import check_description
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.strategies import units_of_branches
from tests.helpers.core_masks import fetch, masked, plan_of


class Scaled(nn.Module):
    """Mixes positions, then channels, times a scale of its own."""

    def __init__(self, scale: float | None = 0.5) -> None:
        super().__init__()
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=6)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale = None if scale is None else nn.Parameter(torch.linspace(scale, 1, 6))
        self.end = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.mix(x.transpose(1, 2)).transpose(1, 2))
        y = self.down(self.up(y))
        if self.scale is not None:
            y = self.scale * y
        return x + self.end(y)


def description(**choice: Any) -> Branch:
    given: dict[str, Any] = {
        "norm": ("mix", "norm"),
        "body": ("up", "down"),
        "after": ("end",),
        "inner": InnerLayers((Cut("up", 0), Cut("down", 1, is_output=True))),
        "parameters": ("scale",),
    }
    return Branch("layer", **given | choice)


@pytest.fixture(autouse=True)
def described(own_descriptions: None) -> None:
    architectures.register(Scaled, description())


def built(scales: Sequence[float | None] = (0.5, 0.3)) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Scaled(scale) for scale in scales])


INPUT = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scales", [(0.5, 0.3), (None, 0.3), (None, None)])
def test_a_layer_that_lacks_is_one_with_zeros(scales: tuple[float | None, ...]) -> None:
    """With neurons a scale is shared."""
    assert len(check_description(built(scales), INPUT)) == 4
    units = units_of_branches(proven_branches(built(scales), "neuron"), strategy="neuron", num_subnetworks=2)
    assert not any("scale" in piece.parameter for unit in units for piece in unit.pieces)


def test_a_absent_one_takes_no_room_and_comes_back() -> None:
    """One zero is read as all of it, which a compiler can multiply with."""
    dense = built()
    model, mask = masked(dense, plan_of(dense, "forward", "block"), 0)
    scale = model[1].scale
    assert (scale.shape, scale.untyped_storage().nbytes(), scale.requires_grad) == ((6,), 4, False)
    assert not scale.any()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(INPUT), model(INPUT))
    mask.undo()
    fetch(mask, dense)
    assert model[1].scale is scale
    assert scale.requires_grad
    assert torch.equal(model(INPUT), dense(INPUT))


def test_what_is_not_named_is_shared() -> None:
    """And the order of what passes its input on is of no account."""
    architectures.register(Scaled, description(norm=("norm", "mix"), parameters=()))
    assert len(check_description(built(), INPUT)) == 4


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"parameters": ("scales",)}, r"0 \(Scaled\) has no parameter 'scales', .*its own are \['scale'\]"),
        ({"parameters": ("training",)}, r"has no parameter 'training'"),
    ],
)
def test_names_that_are_wrong(choice: dict[str, Any], words: str) -> None:
    architectures.register(Scaled, description(**choice))
    with pytest.raises(ValueError, match=words):
        proven_branches(built(), "neuron")
