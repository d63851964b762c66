"""Layers of a subnetwork are as wide as what it holds; ranks/estimate has what they cost."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from transformers.pytorch_utils import Conv1D

from sdp_deepspeed.architectures.branch import BATCH_NORMS, CONVOLUTIONS
from tests.helpers.core_masks import build, masked, plan_of


def says(layer: Any) -> tuple[int, ...]:
    """Widths, in the order of its weight's dimensions."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    if isinstance(layer, CONVOLUTIONS):
        return layer.out_channels, layer.in_channels
    return (layer.num_features,) if isinstance(layer, BATCH_NORMS) else (layer.out_features, layer.in_features)


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "resnet_bottleneck"])
def test_layers_are_stock_modules_that_say_how_wide_they_are(name: str, regime: str) -> None:
    dense = build(name)
    plan = plan_of(dense, regime, "neuron")
    model, _ = masked(dense, plan, 0)
    cut = {piece.parameter for unit in plan.units for piece in unit.pieces if piece.dim is not None}
    for key, layer in dense.named_modules():
        own = model.get_submodule(key)
        assert type(own) is type(layer)
        if isinstance(layer, (nn.Linear, Conv1D, *CONVOLUTIONS, *BATCH_NORMS)):
            is_norm = isinstance(layer, BATCH_NORMS)  # of all channels in the backward regime, where all of them run
            assert says(own) == tuple((own.running_mean if is_norm else own.weight).shape[: len(says(own))])
            is_narrow = f"{key}.weight" in cut and not (is_norm and regime == "backward")
            assert (says(own) != says(layer)) == is_narrow
            if is_narrow and is_norm:
                assert {len(own.weight), len(own.bias), len(own.running_var)} == {own.num_features}
