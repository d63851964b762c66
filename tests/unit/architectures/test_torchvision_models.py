"""torchvision's models in all modes, where it is installed or with `--torchvision FOLDER`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.architectures.families import is_of_package
from sdp_deepspeed.core.masking import Mask
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from sdp_deepspeed.units import Piece
from tests.helpers import models
from tests.helpers.masked_modules import (
    RANKS,
    assert_close,
    assert_same_as_zeroed,
    held_pieces,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from tests.helpers.torchvision_models import MODELS, Classifier, load

NEURONS = {"attention": "block", "mlp": "neuron"}


@pytest.fixture
def torchvision(pytestconfig: pytest.Config) -> Any:
    return load(pytestconfig.getoption("--torchvision"))


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dense(torchvision: Any, name: str) -> nn.Module:
    return built(torchvision, name)


def built(torchvision: Any, name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = models.scrambled(Classifier(MODELS[name](torchvision, **options)))
    # Batch norms over two pixels blow rounding up: to 2% of the loss in fp32, to 1e-10 of it in fp64.
    return model.double() if "resnet" in name else model


def strategy_of(name: str) -> Any:
    return NEURONS if "swin" in name or name == "vit" else "neuron"


def assert_gradients(
    mask: Mask,
    pieces: Mapping[str, list[Piece]],
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> None:
    """Of all that is held, to rounding of sums that may cancel (biases of keys)."""
    floor = max(float(gradient.abs().max()) for gradient in expected.values()) / 64
    assert found.keys() <= {key for key, held in pieces.items() if held}
    for key, held in pieces.items():
        for piece in held:
            other = piece.narrow(expected[key])
            if key in found:
                largest = max(floor, float(expected[key].abs().max()))
                assert_close(mask.model.views.view_in(piece, found[key]), other, largest=largest)
            else:
                assert not other.any(), key


def test_forward_is_zeroed(dense: nn.Module, name: str) -> None:
    assert_as_zeroed = partial(assert_same_as_zeroed, assert_gradients=assert_gradients)
    for rank in RANKS:
        assert_as_zeroed(dense, plan_of(dense, strategy="block"), rank)
        assert_as_zeroed(dense, plan_of(dense, strategy="block", granularity="layer"), rank)
        assert_as_zeroed(dense, plan_of(dense, strategy=strategy_of(name)), rank)


def test_backward_is_dense(dense: nn.Module, name: str) -> None:
    expected_loss, expected = loss_and_gradients(deepcopy(dense).train(), tokens())
    for rank in RANKS:
        for strategy in ("block", strategy_of(name)) if "resnet" not in name else ("block",):
            plan = plan_of(dense, "backward", strategy)
            model, mask = masked(dense, plan, rank)
            loss, gradients = loss_and_gradients(model.train(), tokens())
            assert_close(loss, expected_loss)
            assert_gradients(mask, held_pieces(dense, plan, rank), gradients, expected)


def test_the_dense_model_comes_back(dense: nn.Module, name: str) -> None:
    def fetch(targets: Mapping[Piece, torch.Tensor]) -> None:
        values = dict(dense.named_parameters()) | dict(dense.named_buffers())
        for piece, target in targets.items():
            target.copy_(piece.narrow(values[piece.parameter].detach()))

    with torch.no_grad():
        expected = models.loss_of(dense.eval(), tokens())
        for strategy in ("block", strategy_of(name)):
            model, mask = masked(dense, plan_of(dense, strategy=strategy), 0)
            own = models.loss_of(model.eval(), tokens())
            assert not torch.equal(own, expected)
            for part in mask.parts:
                part.fill(fetch)
            assert torch.equal(models.loss_of(model, tokens()), expected)
            for part in mask.parts:
                part.release()
            assert torch.equal(models.loss_of(model, tokens()), own)


@pytest.mark.parametrize("name", ["convnext", "swin", "swin_v2"])
def test_stochastic_depth(torchvision: Any, name: str) -> None:
    dense = built(torchvision, name, stochastic_depth_prob=0.6)
    plan = plan_of(dense, strategy="block")
    for rank in RANKS:
        zeroed = deepcopy(dense)
        zero_lacking(zeroed, plan, rank)
        held = {piece.parameter for i, u in enumerate(plan.units) if plan.holds_rank(i, rank) for piece in u.pieces}
        for branch in locate_branches(dense):
            if branch.description.parameters and branch.pieces[0].parameter not in held:
                zeroed.get_submodule(branch.layer).stochastic_depth = nn.Identity()
        losses = []
        for model in (zeroed, masked(dense, plan, rank)[0]):
            torch.manual_seed(3)
            losses.append(models.loss_of(model.train(), tokens()))
        assert_close(losses[1], losses[0])


@pytest.mark.parametrize("strategy", ["block", "neuron"])
@pytest.mark.slow
def test_compilers_follow(dense: nn.Module, name: str, strategy: str) -> None:
    plan = plan_of(dense, strategy=strategy if strategy == "block" else strategy_of(name))
    expected_loss, expected = loss_and_gradients(masked(dense, plan, 0)[0].train(), tokens())
    torch.compiler.reset()
    compiled = torch.compile(masked(dense, plan, 0)[0].train(), backend="eager")
    loss, gradients = loss_and_gradients(compiled, tokens())
    assert torch.equal(loss, expected_loss)
    assert {key.removeprefix("_orig_mod.") for key in gradients} == expected.keys()


def test_heads_are_refused_with_the_line_that_works(torchvision: Any) -> None:
    for name in ("swin", "swin_v2", "vit"):
        with pytest.raises(ValueError, match=r"width of a head.*\"strategy\": \{\"attention\": \"block\", \"mlp\""):
            plan_of(built(torchvision, name))


def test_descriptions_are_the_packages_own(dense: nn.Module) -> None:
    """So nothing needs to be tried out."""
    branches = locate_branches(dense)
    assert all(is_of_package(dense.get_submodule(branch.layer)) for branch in branches)


@pytest.mark.parametrize("name", ["resnet", "resnet_bottleneck"])
def test_channels_cannot_run_in_two_parts(torchvision: Any, name: str) -> None:
    """Its layers run what lies between them themselves."""
    dense = built(torchvision, name)
    with pytest.raises(ValueError, match=r"in the backward regime: torchvision's layer runs its ReLU.*\"block\""):
        masked(dense, plan_of(dense, "backward"), 0)
    blocks = {unit.name for unit in plan_of(dense, strategy="block").units}
    first = {"model.layer1.0.convolution"} if name == "resnet" else set()
    assert blocks == first | {f"model.layer{stage}.1.convolution" for stage in (1, 2)}
