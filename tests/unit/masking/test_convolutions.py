"""Inner channels that are cut: narrower convolutions, batch norms and their statistics, in both regimes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from fractions import Fraction
from typing import Any

import pytest
import torch
from sdp_deepspeed.layout.places import PieceViews
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers, registry
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from sdp_deepspeed.units import Piece
from tests.helpers import models
from tests.helpers.convolutional_models import KINDS, build
from tests.helpers.masked_modules import (
    RANKS,
    assert_close,
    cut_names,
    held_pieces,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)


def assert_same_statistics(module: nn.Module, dense: nn.Module, pieces: Sequence[Piece], views: PieceViews) -> None:
    expected = dict(dense.named_buffers())
    for piece in pieces:
        found = views.weight_view(piece)
        assert_close(found.float(), piece.narrow(expected[piece.parameter]).float())


def buffer_pieces(dense: nn.Module, plan: Plan) -> list[tuple[Piece, tuple[int, ...]]]:
    infos = [TensorInfo(name, tuple(b.shape), b.dtype, kind="buffer") for name, b in dense.named_buffers()]
    return [pair for pieces in pieces_by_tensor(infos, plan).values() for pair in pieces]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_held_channels_move_as_those_of_zeroed_pieces(kind: str, momentum: float | None) -> None:
    dense = build(kind)
    for norm in batch_norms(dense):
        norm.momentum = momentum
    plan = plan_of(dense)
    for rank in RANKS:
        module, mask = masked(dense, plan, rank)
        zeroed = deepcopy(dense)
        zero_lacking(zeroed, plan, rank)
        for seed in (3, 4):
            loss_and_gradients(module, tokens(seed))
            loss_and_gradients(zeroed, tokens(seed))
        held = [piece for piece, ranks in buffer_pieces(dense, plan) if rank in ranks]
        assert any(piece.dim is not None for piece in held)
        assert_same_statistics(module, zeroed, held, mask.model.views)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", KINDS)
def test_each_half_updates_its_own_statistics_and_what_is_whole_once(kind: str, momentum: float | None) -> None:
    dense = build(kind)
    for norm in batch_norms(dense):
        norm.momentum = momentum
    plan = plan_of(dense, "backward")
    module, mask = masked(dense, plan, 0)
    for seed in (3, 4):
        loss_and_gradients(module, tokens(seed))
        loss_and_gradients(dense, tokens(seed))
    module.eval()
    models.loss_of(module, tokens())  # with gradients the halves run; evaluation moves nothing
    pieces = [piece for piece, _ in buffer_pieces(dense, plan)]
    assert_same_statistics(module, dense, pieces, mask.model.views)
    counts = {name: int(count) for name, count in module.named_buffers() if name.endswith("num_batches_tracked")}
    assert set(counts.values()) == {2}


def batch_norms(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_are_narrower_and_say_so(kind: str) -> None:
    dense = build(kind)
    module, mask = masked(dense, plan_of(dense), 0)
    for name, layer in dense.named_modules():
        narrow: Any = module.get_submodule(name)
        if isinstance(layer, nn.Conv2d):
            assert narrow.weight.shape[:2] == (narrow.out_channels, narrow.in_channels)
        if isinstance(layer, nn.BatchNorm2d):
            lengths = {len(vector) for vector in (narrow.weight, narrow.bias, narrow.running_mean, narrow.running_var)}
            assert lengths == {narrow.num_features}
    counts = [layer.in_channels * layer.out_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    whole = [layer.in_channels * layer.out_channels for layer in dense.modules() if isinstance(layer, nn.Conv2d)]
    assert sum(count < all_ for count, all_ in zip(counts, whole, strict=True)) == 2 * 5
    for part in mask.parts:
        part.fill(lambda targets: None)
    assert f"{module}" == f"{dense}"


@pytest.mark.parametrize("kind", KINDS)
def test_flops_fall_as_the_cut_weights_do(kind: str) -> None:
    """Each weight of a convolution is used once at each position of its output."""
    dense = build(kind)
    found = [flops_of(model) for model in (dense, *(masked(dense, plan_of(dense), rank)[0] for rank in RANKS))]
    cut = {n for n in cut_names(plan_of(dense)) if dict(dense.named_parameters()).get(n, torch.zeros(1)).dim() == 4}
    assert all(of_rank[name] < found[0][name] for of_rank in found[1:] for name in cut)
    for name, whole in found[0].items():
        shares = [held_share(dense, name, rank) for rank in RANKS]
        assert [of_rank[name] for of_rank in found[1:]] == [whole * share for share in shares]
        assert sum(shares) == (1 if name in cut else 2)


def held_share(dense: nn.Module, name: str, rank: int) -> Fraction:
    shape = dense.get_parameter(name).shape
    held = held_pieces(dense, plan_of(dense), rank)[name]
    return Fraction(sum(piece.num_elements(shape) for piece in held), shape.numel())


def flops_of(model: nn.Module) -> dict[str, int]:
    """Multiplications of each convolution."""
    found: dict[str, int] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            key = f"{name}.weight"
            layer.register_forward_hook(
                lambda layer, _, output, key=key: found.update(
                    {key: output.shape[0] * output[0, 0].numel() * layer.weight.numel()}
                )
            )
    models.loss_of(model, tokens())
    return found


class Inverted(nn.Module):
    """Of a mobile net: a wide layer, one that runs on each channel by itself, and back."""

    def __init__(self, width: int = 4, *, groups: int = 12, affine: bool = True) -> None:
        super().__init__()
        self.up, self.norm = nn.Conv2d(width, 12, 1), nn.BatchNorm2d(12, affine=affine)
        self.depth, self.norm2 = nn.Conv2d(12, 12, 3, padding=1, groups=groups), nn.BatchNorm2d(12)
        self.down = nn.Conv2d(12, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.norm2(self.depth(torch.relu(self.norm(self.up(x)))))))
        return result


class InvertedLayer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = Inverted(**options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.body(x)
        return result


INVERTED = tuple(Cut(name, 0) for name in ("up", "norm", "depth", "norm2"))


@pytest.fixture
def own_description(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    inner = InnerLayers((*INVERTED, Cut("down", 1, is_output=True)))
    architectures.register(InvertedLayer, Branch("mlp", body="body", inner=inner))


@pytest.mark.usefixtures("own_description")
@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("affine", [True, False])
def test_convolutions_on_each_channel_by_itself_are_cut_with_them(regime: str, affine: bool) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(InvertedLayer(affine=affine), InvertedLayer())
    x = torch.randn(2, 4, 5, 5)
    for rank in RANKS:
        plan = plan_of(dense, regime)
        expected = deepcopy(dense)
        if regime == "forward":
            zero_lacking(expected, plan, rank)
        module, _ = masked(dense, plan, rank)
        assert_close(module(x), expected(x))
        narrow: Any = module[0].body.depth
        assert narrow.groups == narrow.in_channels == narrow.out_channels == len(narrow.weight) < 12


@pytest.mark.usefixtures("own_description")
def test_other_groups_and_uncut_batch_norms_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"body\.depth is a Conv2d in 3 groups, whose channels do not all read the same"
    ):
        plan_of(nn.Sequential(InvertedLayer(groups=3)))
    plan_of(nn.Sequential(InvertedLayer(groups=3), InvertedLayer()), strategy="block")
    for cuts in (INVERTED[:1] + INVERTED[2:], (INVERTED[0], INVERTED[2])):
        inner = InnerLayers((*cuts, Cut("down", 1, is_output=True)))
        architectures.register(InvertedLayer, Branch("mlp", body="body", inner=inner))
        with pytest.raises(ValueError, match=r"norm \(BatchNorm2d\) has an element for each of the 12 neurons"):
            plan_of(nn.Sequential(InvertedLayer()))


@pytest.mark.parametrize("mode", [("forward", "block"), ("forward", "neuron"), ("backward", "neuron")])
@pytest.mark.slow
def test_compilers_follow(mode: tuple[str, str]) -> None:
    dense = build("bottleneck")
    plan = plan_of(dense, *mode)
    expected_loss, expected = loss_and_gradients(masked(dense, plan, 0)[0], tokens())
    compiled: Any = torch.compile(masked(dense, plan, 0)[0], backend="eager", fullgraph=True)
    loss, gradients = loss_and_gradients(compiled, tokens())
    assert torch.equal(loss, expected_loss)
    assert {key.removeprefix("_orig_mod.") for key in gradients} == expected.keys()
