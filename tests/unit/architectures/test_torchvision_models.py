"""torchvision's models in all modes, where it is installed or with `--torchvision FOLDER`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.config import MODES
from tests.helpers import models
from tests.helpers.core_masks import assert_close, assert_masked, expected_of, fetch, masked, plan_of, run
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
    return (model.double() if "resnet" in name else model).train()


def strategy_of(name: str) -> Any:
    return NEURONS if "swin" in name or name == "vit" else "neuron"


@pytest.mark.parametrize(("regime", "strategy"), MODES)
def test_masked_is_zeroed_or_dense_and_comes_back(dense: nn.Module, name: str, regime: str, strategy: str) -> None:
    chosen = "block" if strategy == "block" else strategy_of(name)
    for rank, granularity in ((0, "sublayer"), (1, "layer")):
        _, mask = assert_masked(dense, plan_of(dense, regime, chosen, granularity=granularity), rank)
        mask.undo()
        fetch(mask, dense)
        assert all(torch.equal(p, dense.get_parameter(key)) for key, p in mask.parameters.items())


@pytest.mark.parametrize("name", ["convnext", "swin", "swin_v2"])
def test_stochastic_depth(torchvision: Any, name: str) -> None:
    dense = built(torchvision, name, stochastic_depth_prob=0.6).train()
    plan = plan_of(dense, "forward", "block")
    for rank in (0, 1):
        model, mask = masked(dense, plan, rank)
        zeroed: Any = expected_of(dense, plan, rank)
        for branch in mask.branches:
            if branch.description.parameters and not mask.is_held(branch.pieces[0]):
                zeroed.get_submodule(branch.layer).stochastic_depth = nn.Identity()
        assert_close(run(model)[0], run(zeroed)[0])


def test_heads_are_refused_with_the_line_that_works(torchvision: Any) -> None:
    for name in ("swin", "swin_v2", "vit"):
        with pytest.raises(ValueError, match=r"width of a head.*\"strategy\": \{\"attention\": \"block\", \"mlp\""):
            plan_of(built(torchvision, name), "forward", "neuron")
