"""What is special of vision models: windows, drop path, tables of positions, scales of layers, stages."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.core_masks import (
    assert_close,
    assert_gradients,
    assert_masked,
    build,
    expected_of,
    masked,
    plan_of,
    run,
    tokens,
)
from tests.helpers.models import inputs_of


@pytest.mark.parametrize("name", ["convnext", "dinov2", "swin", "swinv2"])
def test_drop_path_drops_of_what_is_held_as_in_the_dense_model(name: str) -> None:
    """A absent branch's own does not draw, a common one does."""
    dense = build(name, drop_path_rate=0.6)
    for granularity in ("sublayer", "layer"):
        plan = plan_of(dense, "forward", "block", granularity=granularity)
        model, mask = masked(dense, plan, 0)
        zeroed = expected_of(dense, plan, 0)
        for branch in mask.branches:
            if "drop_path" in branch.description.after and not mask.is_held(branch.pieces[0]):
                zeroed.get_submodule(branch.layer).drop_path = nn.Identity()
        (loss, _, found), (expected_loss, _, expected) = run(model), run(zeroed)
        assert_close(loss, expected_loss)
        assert_gradients(mask, found, expected)


def test_convnext_without_a_scale() -> None:
    dense = build("convnext", layer_scale_init_value=0.0)
    assert dense.convnext.encoder.stages[0].layers[0].layer_scale_parameter is None
    assert_masked(dense, plan_of(dense, "forward", "block"), 0)


def test_channels_last_stays() -> None:
    """A absent branch gives its input on as it is."""
    dense = build("convnext").to(memory_format=torch.channels_last)
    model, _ = masked(dense, plan_of(dense, "forward", "block"), 0)
    formats = []
    for layer in (layer for stage in model.convnext.encoder.stages for layer in stage.layers):
        layer.register_forward_hook(
            lambda *args: formats.append(args[2].is_contiguous(memory_format=torch.channels_last))
        )
    inputs = inputs_of(model, tokens())
    inputs["pixel_values"] = inputs["pixel_values"].contiguous(memory_format=torch.channels_last)
    model(**inputs)
    assert formats == [True] * 3
