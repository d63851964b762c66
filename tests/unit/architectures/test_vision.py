"""What is special of vision models: windows, drop path, tables of positions, scales of layers, stages."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches, units_of_branches
from sdp_deepspeed.reference.virtual_workers import zero_lacking
from sdp_deepspeed.units import Unit
from tests.helpers import models
from tests.helpers.masked_modules import (
    RANKS,
    Saved,
    assert_close,
    flops,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from tests.helpers.more_models import SPECIMENS

# Of `more_models`, with stochastic depth.
DROPS = ("convnext", "dinov2", "swin", "swinv2")
# By name: what its drop path is not a module of any branch.
COMMON = ("dinov2", "swinv2")


def build(name: str, **options: Any) -> Any:
    return deepcopy(_built(name, tuple(sorted(options.items()))))


@cache
def _built(name: str, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    specimen = SPECIMENS[name]
    return models.scrambled(specimen.model(specimen.config(**{**specimen.options, **dict(options)})))


def units_of(name: str, **choice: Any) -> dict[str, Unit]:
    branches = locate_branches(build(name))
    return {unit.name: unit for unit in units_of_branches(branches, **choice)}


def seeded(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients in training mode, with the same random numbers each time."""
    torch.manual_seed(3)
    return loss_and_gradients(model.train(), tokens())


@pytest.mark.parametrize("name", DROPS)
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
def test_drop_path_drops_of_what_is_held_as_in_the_dense_model(name: str, granularity: str) -> None:
    """A lacking branch's own does not draw, a common one does."""
    dense = build(name, drop_path_rate=0.6)
    plan = plan_of(dense, strategy="block", granularity=granularity)
    for rank in RANKS:
        model, _ = masked(dense, plan, rank)
        loss, gradients = seeded(model)
        zeroed = deepcopy(dense)
        zero_lacking(zeroed, plan, rank)
        held = {piece.parameter for i, u in enumerate(plan.units) if plan.holds_rank(i, rank) for piece in u.pieces}
        for branch in locate_branches(dense):
            if "drop_path" in branch.description.after and branch.pieces[0].parameter not in held:
                zeroed.get_submodule(branch.layer).drop_path = nn.Identity()
        expected_loss, expected = seeded(zeroed)
        assert_close(loss, expected_loss)
        for key, gradient in gradients.items():
            assert_close(gradient, expected[key], largest=max(float(g.abs().max()) for g in expected.values()))


@pytest.mark.parametrize("name", DROPS)
def test_drop_path_is_alive(name: str) -> None:
    dense = build(name, drop_path_rate=0.6).train()
    losses = {models.loss_of(dense, tokens()).item() for _ in range(20)}
    assert len(losses) > 1
    assert [any("drop_path" in b.description.after for b in locate_branches(dense))] == [name not in COMMON]


@pytest.mark.parametrize("name", DROPS)
def test_both_halves_of_a_branch_are_dropped_together(name: str) -> None:
    dense = build(name, drop_path_rate=0.6)
    expected_loss, expected = seeded(deepcopy(dense))
    model, _ = masked(dense, plan_of(dense, "backward"), 0)
    loss, gradients = seeded(model)
    assert_close(loss, expected_loss)
    for key in gradients.keys() & expected.keys():
        if gradients[key].shape == expected[key].shape:
            assert_close(gradients[key], expected[key], largest=max(float(g.abs().max()) for g in expected.values()))


@pytest.mark.parametrize("name", ["convnext", "dinov2", "dinov2_swiglu", "swin", "swinv2"])
@pytest.mark.parametrize(("regime", "strategy"), [("forward", "block"), ("forward", "neuron"), ("backward", "neuron")])
@pytest.mark.slow
def test_compilers_follow(name: str, regime: str, strategy: str) -> None:
    dense = build(name)
    plan = plan_of(dense, regime, strategy)
    expected_loss, expected = loss_and_gradients(masked(dense, plan, 0)[0].train(), tokens())
    torch.compiler.reset()
    compiled = torch.compile(masked(dense, plan, 0)[0].train(), backend="eager", fullgraph=True)
    loss, gradients = loss_and_gradients(compiled, tokens())
    assert torch.equal(loss, expected_loss)
    assert {key.removeprefix("_orig_mod.") for key in gradients} == expected.keys()
    for key, gradient in gradients.items():
        assert_close(gradient, expected[key.removeprefix("_orig_mod.")])


def test_a_head_of_swin_has_its_column_of_the_table() -> None:
    units = units_of("swin", strategy="neuron", neuron_groups=2)
    layers = "swin.encoder.layers"
    assert {name for name in units if "head" in name} == {
        *(f"{layers}.0.blocks.0.attention.head_{head}" for head in range(3)),
        *(f"{layers}.1.blocks.{block}.attention.head_{head}" for block in (0, 1) for head in range(6)),
    }
    pieces = {p.parameter.rpartition("attention.")[2]: p for p in units[f"{layers}.1.blocks.1.attention.head_4"].pieces}
    table = pieces["relative_position_bias.relative_position_bias_table"]
    assert (table.dim, table.start, table.length) == (1, 4, 1)
    assert (pieces["q_proj.weight"].dim, pieces["q_proj.weight"].start, pieces["q_proj.weight"].length) == (0, 16, 4)
    assert "relative_position_bias.relative_position_index" not in pieces, "all heads look up alike"


def test_a_head_of_swin_v2_has_its_scale() -> None:
    units = units_of("swinv2", strategy="neuron", neuron_groups=2)
    unit = next(unit for name, unit in units.items() if name.endswith("1.blocks.1.attention.head_4"))
    pieces = {
        piece.parameter.rpartition("attention.")[2]: (piece.dim, piece.start, piece.length) for piece in unit.pieces
    }
    assert pieces["self.logit_scale"] == (0, 4, 1)
    assert pieces["self.continuous_position_bias_mlp.2.weight"] == (0, 4, 1)
    assert "self.continuous_position_bias_mlp.0.weight" not in pieces


def test_a_block_has_what_only_it_uses() -> None:
    """Buffers and scales too; what changes the stream's shape is shared."""
    blocks = units_of("swin")
    attention = {piece.parameter for piece in blocks["swin.encoder.layers.0.blocks.0.attention"].pieces}
    assert any(name.endswith("relative_position_index") for name in attention)
    layer = {piece.parameter for piece in units_of("convnext")["convnext.encoder.stages.1.layers.1.layer"].pieces}
    prefix = "convnext.encoder.stages.1.layers.1"
    assert {f"{prefix}.layer_scale_parameter", f"{prefix}.dwconv.weight", f"{prefix}.layernorm.bias"} < layer
    attention = {piece.parameter for piece in units_of("dinov2")["dinov2.encoder.layer.0.attention"].pieces}
    assert "dinov2.encoder.layer.0.layer_scale1.lambda1" in attention
    for name in DROPS:
        inside = {piece.parameter for unit in units_of(name).values() for piece in unit.pieces}
        assert not any("downsampl" in parameter for parameter in inside)


def test_convnext_without_a_scale() -> None:
    dense = build("convnext", layer_scale_init_value=0.0)
    assert dense.convnext.encoder.stages[0].layers[0].layer_scale_parameter is None
    plan = plan_of(dense, strategy="block")
    for rank in RANKS:
        zeroed = deepcopy(dense)
        zero_lacking(zeroed, plan, rank)
        assert_close(models.loss_of(masked(dense, plan, rank)[0], tokens()), models.loss_of(zeroed, tokens()))


@pytest.mark.parametrize("name", ["convnext", "swin"])
@pytest.mark.parametrize("strategy", ["block", "neuron"])
def test_a_worker_computes_and_keeps_less(name: str, strategy: str) -> None:
    """Matrix products fall with what it holds, and so does what autograd keeps."""
    dense = build(name)
    plan = plan_of(dense, strategy=strategy)
    whole, _ = flops(dense)
    found = [flops(masked(dense, plan, rank)[0])[0] for rank in RANKS]
    share = sum(products.flops for products in found) / (2 * whole.flops)
    assert share < 0.75  # half, and the embedding, down-sampling and head
    kept = []
    for model in (dense, *(masked(dense, plan, rank)[0] for rank in RANKS)):
        with Saved(list(model.parameters())) as saved:
            models.loss_of(model, tokens())
        kept.append(saved.num_bytes)
    assert kept[1] + kept[2] < 1.6 * kept[0]


def test_channels_last_stays() -> None:
    """A lacking branch gives its input on as it is."""
    dense = build("convnext").to(memory_format=torch.channels_last)
    model, _ = masked(dense, plan_of(dense, strategy="block"), 0)
    formats = []
    for layer in (layer for stage in model.convnext.encoder.stages for layer in stage.layers):
        layer.register_forward_hook(
            lambda *args: formats.append(args[2].is_contiguous(memory_format=torch.channels_last))
        )
    inputs = models.inputs_of(model, tokens())
    inputs["pixel_values"] = inputs["pixel_values"].contiguous(memory_format=torch.channels_last)
    model(**inputs)
    assert formats == [True] * 3
