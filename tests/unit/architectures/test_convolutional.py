"""ResNets: which branches are blocks, which are shared, and what batch norms' buffers do."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, Cut, InnerLayers
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.check_description import check_description
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.strategies import units_of_branches
from sdp_deepspeed.units import Unit
from tests.helpers.core_masks import masked, plan_of
from tests.helpers.hand_written import Adds

KINDS = ("basic", "bottleneck")
BLOCKS = [f"resnet.encoder.stages.{stage}.layers.{layer}.convolution" for stage, layer in ((0, 1), (1, 1), (1, 2))]


def build(kind: str, **options: Any) -> nn.Module:
    sizes: dict[str, Any] = {"embedding_size": 6, "hidden_sizes": [12, 16], "depths": [2, 3], "num_labels": 5}
    return ResNetForImageClassification(ResNetConfig(**sizes | {"layer_type": kind} | options))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_an_identity_bypasses(kind: str) -> None:
    model = build(kind)
    branches = proven_branches(model, "neuron")
    assert [branch.name for branch in branches if branch.is_bypassed] == BLOCKS
    for granularity in ("sublayer", "layer"):
        units = units_of_branches(branches, strategy="block", granularity=granularity)
        assert [unit.name.removesuffix(".convolution") for unit in units] == [
            name.removesuffix(".convolution") for name in BLOCKS
        ]
        kinds = {(piece.parameter.rpartition(".")[2], piece.kind) for piece in units[0].pieces}
        assert {name for name, of in kinds if of == "buffer"} == {"running_mean", "running_var", "num_batches_tracked"}


def test_a_model_without_a_block_is_refused() -> None:
    model = build("basic", depths=[1, 1])
    with pytest.raises(ValueError, match=r"strategy: no branch of the model can be a block.*\"neuron\""):
        units_of_branches(proven_branches(model, "neuron"), strategy="block")


def test_a_plan_whose_block_is_bypassed_by_a_projection_is_refused() -> None:
    dense = build("basic")
    branches = proven_branches(dense, "neuron")
    plan = plan_of(dense, "forward", "block")
    assert not branches[0].is_bypassed
    with pytest.raises(ValueError, match=r"plan: unit 'stem' is neither whole branches bypassed by an identity"):
        Mask(dense, replace(plan, units=(Unit("stem", branches[0].pieces), *plan.units[1:])), 0, branches)


def inverted(*, affine: bool = True) -> Adds:
    """Of a mobile net: a wide layer, one that runs on each channel by itself, and back."""
    up, down = nn.Conv2d(4, 12, 1), nn.Conv2d(12, 4, 1)
    first = OrderedDict(up=up, norm=nn.BatchNorm2d(12, affine=affine), relu=nn.ReLU())
    depth = OrderedDict(depth=nn.Conv2d(12, 12, 3, padding=1, groups=12), norm2=nn.BatchNorm2d(12), relu2=nn.ReLU())
    return Adds(body=nn.Sequential(OrderedDict(**first, **depth, down=down)))


@pytest.mark.usefixtures("own_descriptions")
@pytest.mark.parametrize("affine", [True, False])
def test_convolutions_on_each_channel_by_itself_are_cut_with_them(affine: bool) -> None:
    torch.manual_seed(0)
    cuts = [Cut(name, 0) for name in ("up", "norm", "depth", "norm2")]
    inner = InnerLayers((*cuts, Cut("down", 1, is_output=True)))
    architectures.register(Adds, Branch("mlp", body="body", inner=inner))
    dense = nn.Sequential(inverted(affine=affine), inverted()).double()
    assert len(check_description(dense, torch.randn(2, 4, 5, 5, dtype=torch.float64))) == 4
    narrow: Any = masked(dense, plan_of(dense, "forward", "neuron"), 0)[0][0].body.depth
    assert narrow.groups == narrow.in_channels == narrow.out_channels == len(narrow.weight) < 12
