"""A branch of several modules before its body, and of parameters that are the layer's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers, locate_branches, registry, units_of_branches
from sdp_deepspeed.core.masking import Mask
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from sdp_deepspeed.units import Piece
from tests.helpers.descriptions import check
from tests.helpers.masked_modules import assert_close, infos
from tests.helpers.rank_models import mask_of


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
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    architectures.register(Scaled, description())


def built(scales: Sequence[float | None] = (0.5, 0.3)) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Scaled(scale) for scale in scales])


def masked(dense: nn.Module, *, rank: int = 0, **choice: Any) -> tuple[Any, Mask, Plan]:
    """A copy as one of two ranks has it, with one unit each."""
    module = deepcopy(dense)
    branches = locate_branches(module)
    units = units_of_branches(branches, **choice)
    holders = tuple((index % 2,) for index in range(len(units)))
    plan = Plan("forward", str(choice.get("strategy", "block")), 2, 1, 0, tuple(units), holders, (0, 1))
    return module, mask_of(module, branches, infos(module), plan, rank), plan


INPUT = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


def test_they_are_of_the_unit() -> None:
    units = units_of_branches(locate_branches(built()))
    names = [piece.parameter.removeprefix("0.") for piece in units[0].pieces]
    assert [name.split(".")[0] for name in names[::2]] == ["mix", "norm", "up", "down", "scale"]
    assert names[-1] == "scale"


@pytest.mark.parametrize("scales", [(0.5, 0.3), (None, 0.3), (None, None)])
def test_a_layer_that_lacks_is_one_with_zeros(scales: tuple[float | None, ...]) -> None:
    dense = built(scales)
    for rank in (0, 1):
        module, _, plan = masked(dense, rank=rank)
        zeroed = deepcopy(dense)
        zero_lacking(zeroed, plan, rank)
        expected, found = zeroed(INPUT), module(INPUT)
        assert_close(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        held = {piece.parameter for index, unit in enumerate(plan.units) if index == rank for piece in unit.pieces}
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        assert gradients.keys() == held
        for name, gradient in gradients.items():
            other = zeroed.get_parameter(name).grad
            assert other is not None
            assert_close(gradient, other)


def test_a_lacking_one_takes_no_room_and_comes_back() -> None:
    """One zero is read as all of it, which a compiler can multiply with."""
    dense = built()
    module, mask, _ = masked(dense)
    scale = module[1].scale
    assert (scale.shape, scale.untyped_storage().nbytes(), scale.requires_grad) == ((6,), 4, False)
    assert not scale.any()
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(INPUT), module(INPUT))
    part = next(part for part in mask.parts if not part.whole)

    def fetch(targets: Mapping[Piece, torch.Tensor]) -> None:
        for piece, target in targets.items():
            target.copy_(dense.get_parameter(piece.parameter))

    with torch.no_grad():
        part.fill(fetch)
        assert torch.equal(module(INPUT), dense(INPUT))
        part.release()
    assert scale.untyped_storage().nbytes() == 4
    mask.undo()
    assert module[1].scale is scale
    assert scale.requires_grad


def test_with_neurons_they_are_shared() -> None:
    dense = built()
    module, _, plan = masked(dense, strategy="neuron", num_subnetworks=2)
    assert not any("scale" in piece.parameter for unit in plan.units for piece in unit.pieces)
    zeroed = deepcopy(dense)
    zero_lacking(zeroed, plan, 0)
    assert_close(module(INPUT), zeroed(INPUT))


def test_it_is_tried_out() -> None:
    assert check(built()) == []
    architectures.register(Scaled, description(norm=("norm", "mix"), parameters=()))
    assert check(built()) == []  # left out it is shared; the order of what passes on is of no account


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"parameters": ("scales",)}, r"0 \(Scaled\) has no parameter 'scales', .*its own are \['scale'\]"),
        ({"parameters": ("training",)}, r"has no parameter 'training'"),
        ({"norm": ("mix", "norms")}, r"no submodule 'norms'"),
    ],
)
def test_names_that_are_wrong(choice: dict[str, Any], words: str) -> None:
    architectures.register(Scaled, description(**choice))
    with pytest.raises(ValueError, match=words):
        locate_branches(built())


def test_descriptions_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"parameters: name in `after` a submodule that runs once 'scale' was read"):
        description(after=())
    with pytest.raises(ValueError, match=r"'norm' is named twice"):
        description(norm=("mix", "norm", "norm"))
    with pytest.raises(ValueError, match=r"'mix.weight' is named twice, or inside of another"):
        description(parameters=("mix.weight",))


def test_cells_that_cannot_run_in_two_parts_are_refused_in_the_backward_regime() -> None:
    inner = InnerLayers((Cut("up", 0), Cut("down", 1, is_output=True)), undivided_reason="it runs something itself")
    architectures.register(Scaled, description(inner=inner))
    model = built()
    assert masked(model, strategy="neuron", num_subnetworks=2)[1].parts
    branches = locate_branches(model)
    units = units_of_branches(branches, strategy="neuron", num_subnetworks=2)
    plan = Plan("backward", "neuron", 2, 1, 0, tuple(units), ((0,), (1,), (1,), (0,)), (0, 1))
    with pytest.raises(ValueError, match=r"'0\.layer' in the backward regime: it runs something itself; use \"block\""):
        mask_of(model, branches, infos(model), plan, 0)
