"""Forward masking, neuron strategy, physically: what a rank lacks is nowhere, and what it has is a stock module."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from sdp_deepspeed.masking.neuron import NeuronPart
from sdp_deepspeed.masking.part import Fetch
from torch import nn
from transformers.pytorch_utils import Conv1D

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.units import Piece
from tests.helpers import models
from tests.helpers.live_tensors import Watch
from tests.helpers.masked_modules import (
    NAMES,
    RANKS,
    Products,
    assert_same_as_zeroed,
    build,
    counted_attention,
    cut_names,
    held_pieces,
    infos,
    layer_of,
    linear_weights,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from tests.helpers.rank_models import mask_of


def num_held(model: nn.Module, pieces: dict[str, list[Piece]]) -> int:
    return sum(piece.num_elements(p.shape) for name, p in model.named_parameters() for piece in pieces[name])


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_masked_is_zeroed(name: str, rank: int) -> None:
    model = build(name)
    assert_same_as_zeroed(model, plan_of(model), rank)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", ["gpt2", "llama_odd", "gpt_neox_parallel"])
def test_parts_may_be_neurons_blocks_or_shared(name: str, rank: int) -> None:
    model = build(name, num_layers=2)
    layers = "|".join(dict.fromkeys(branch.layer for branch in locate_branches(model)))
    assert_same_as_zeroed(model, plan_of(model, strategy=models.MIXED), rank)
    assert_same_as_zeroed(model, plan_of(model, strategy={"mlp": "neuron"}), rank)
    shared = (rf"({layers})\.attention\.head_0$", rf"({layers})\.mlp\.group_1$")
    plan = plan_of(model, shared=shared)
    assert len(plan.units) < len(plan_of(model).units)
    assert_same_as_zeroed(model, plan, rank)


@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "gpt_neox"])
def test_padded_batches_and_eager_attention(name: str) -> None:
    model: Any = build(name)
    padded = torch.ones(2, models.LENGTH, dtype=torch.long)
    padded[0, :3] = 0
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        assert_same_as_zeroed(model, plan_of(model), 0, attention_mask=padded)


@pytest.mark.parametrize("options", [{"reorder_and_upcast_attn": True}, {"scale_attn_by_inverse_layer_idx": True}])
def test_other_forms_of_gpt2_attention(options: dict[str, bool]) -> None:
    model: Any = build("gpt2", num_layers=2)
    model.set_attn_implementation("eager")
    for block in model.transformer.h:
        for key, value in options.items():
            setattr(block.attn, key, value)
        if "scale_attn_by_inverse_layer_idx" in options:
            block.attn.scaling /= block.attn.layer_idx + 1
    assert_same_as_zeroed(model, plan_of(model), 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_dense_tensors_are_gone(name: str) -> None:
    """Their memory belongs to arrays that can be asked whether they are still there."""
    with Watch():  # makes collecting garbage fast
        for regime in ("forward", "backward"):
            model = build(name)
            arrays = {key: backed_by_array(parameter) for key, parameter in model.named_parameters()}
            plan = plan_of(model, regime)
            mask = mask_of(model, locate_branches(model), infos(model), plan, 0)
            gc.collect()
            assert {key for key, array in arrays.items() if array() is None} == cut_names(plan)
            assert len(mask.parts) == 2


def backed_by_array(parameter: torch.Tensor) -> weakref.ref[Any]:
    array = parameter.detach().numpy().copy()
    parameter.data = torch.from_numpy(array)
    return weakref.ref(array)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_is_held(name: str) -> None:
    dense = build(name)
    plan, shapes = plan_of(dense), {key: parameter.shape for key, parameter in dense.named_parameters()}
    buffers = sum(buffer.untyped_storage().nbytes() for buffer in dense.buffers())
    with Watch() as watch:
        for rank in RANKS:
            pieces = held_pieces(dense, plan, rank)
            model, mask = masked(dense, plan, rank)
            assert watch.num_bytes() == 4 * num_held(dense, pieces) + buffers
            for key, parameter in model.named_parameters():
                expected = sum(piece.num_elements(shapes[key]) for piece in pieces[key])
                assert parameter.untyped_storage().nbytes() == 4 * expected
                assert parameter.storage_offset() == 0
            assert num_held(dense, pieces) < sum(p.numel() for p in dense.parameters())
            del model, mask, parameter


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_stock_modules_that_say_how_wide_they_are(name: str) -> None:
    dense = build(name)
    cut = cut_names(plan_of(dense))
    for regime in ("forward", "backward"):
        model, mask = masked(dense, plan_of(dense, regime), 0)
        bodies = {id(module) for part in mask.parts for module in part.modules}
        whole = dict(dense.named_modules())
        for key, module in model.named_modules():
            assert type(module) is type(whole[key]) or (regime == "backward" and id(module) in bodies)
            if isinstance(module, nn.Linear | Conv1D):
                assert sizes(module) == tuple(module.weight.shape)
                assert (sizes(module) != sizes(whole[key])) == (f"{key}.weight" in cut)
                assert module.bias is None or f"{key}.bias" not in cut or len(module.bias) in module.weight.shape


def sizes(module: Any) -> tuple[int, ...]:
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.out_features, module.in_features)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_work_is_what_is_held(name: str, rank: int) -> None:
    """A weight costs 2 FLOPs per token forward, 2 for the input's gradient and 2 for its own; one fused attention per
    layer, with the rank's heads; no more products than the dense model has."""
    dense = build(name, num_layers=2)
    plan, num_tokens = plan_of(dense), tokens().numel()
    pieces = held_pieces(dense, plan, rank)
    with Products() as whole, counted_attention() as heads:
        loss_and_gradients(dense, tokens())
    assert whole.flops == 6 * num_tokens * linear_weights(dense)
    model, mask = masked(dense, plan, rank)
    with Products() as products, counted_attention() as calls:
        loss_and_gradients(model, tokens())
    assert products.flops == 6 * num_tokens * linear_weights(dense, pieces)
    assert products.flops < whole.flops
    assert products.num_calls == whole.num_calls
    assert len(calls) == len(heads) == 2
    branches = [branch for branch in locate_branches(dense) if branch.description.name == "attention"]
    for branch, (queries, keys), (all_queries, all_keys) in zip(branches, calls, heads, strict=True):
        held = [
            u for u, unit in enumerate(plan.units) if unit.name.startswith(branch.name) and plan.holds_rank(u, rank)
        ]
        assert (queries * branch.num_cells, keys * branch.num_cells) == (all_queries * len(held), all_keys * len(held))
    assert all(isinstance(part, NeuronPart) and not part.twins for part in mask.parts)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_changes_nothing(name: str, regime: str, reentrant: bool) -> None:
    dense = build(name, num_layers=2)
    plan = plan_of(dense, regime)
    expected_loss, expected = loss_and_gradients(masked(dense, plan, 0)[0], tokens())
    checkpointed, mask = masked(dense, plan, 0)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs = []
    for part in mask.parts:
        part.modules[0].register_forward_pre_hook(lambda *_: runs.append(1))
    loss, gradients = loss_and_gradients(checkpointed.train(), tokens())
    assert len(runs) == 2 * len(mask.parts)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[key], expected[key]) for key in expected)


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "gpt_neox_parallel"])
def test_dropout_acts_in_training_only(name: str, regime: str) -> None:
    dense: Any = build(name)
    for key in ("attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop"):
        if hasattr(dense.config, key):
            setattr(dense.config, key, 0.3)
    for module in dense.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.3
    model, _ = masked(dense, plan_of(dense, regime), 0)
    model.train()
    (one, gradients), (other, _) = loss_and_gradients(model, tokens()), loss_and_gradients(model, tokens())
    assert one != other
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    model.eval()
    assert torch.equal(models.loss_of(model, tokens()), models.loss_of(model, tokens()))


def dense_pieces(dense: nn.Module) -> Fetch:
    """What holders would send."""

    def fetch(targets: Mapping[Piece, torch.Tensor]) -> None:
        for piece, target in targets.items():
            target.copy_(piece.narrow(dense.get_parameter(piece.parameter).detach()))

    return fetch


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_released_it_is_the_subnetwork_again(name: str) -> None:
    """With the numbers of heads and neurons that its modules say, which some compute with."""
    dense = build(name)
    model, mask = masked(dense, plan_of(dense), 0)
    expected, said = models.loss_of(model, tokens()), counts_of(model)
    for part in mask.parts:
        part.fill(dense_pieces(dense))
    assert counts_of(model) == counts_of(dense) != said
    assert torch.equal(models.loss_of(model, tokens()), models.loss_of(dense, tokens()))
    for part in mask.parts:
        part.release()
    assert counts_of(model) == said
    assert torch.equal(models.loss_of(model, tokens()), expected)


def counts_of(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is int
    }


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama_biases", "gpt2"])
def test_the_dense_model_has_scaled_branches_and_the_subnetwork_has_not(name: str) -> None:
    """A half (of two workers one holds each unit) is exact. What is changed in the dense model is stored unscaled."""
    dense = build(name)
    model, plan = deepcopy(dense), plan_of(dense)
    mask = mask_of(model, locate_branches(model), infos(model), plan, 0, scales=True)
    outputs = {f"{layer_of(branch, -1)}.weight" for branch in locate_branches(dense)}
    held = [piece for index in plan.units_of(0) for piece in plan.units[index].pieces]
    for change in (1, 8):
        for part in mask.parts:
            part.fill(dense_pieces(dense))
        for key, parameter in dense.named_parameters():
            assert torch.equal(model.get_parameter(key), parameter * (0.5 if key in outputs else 1)), key
            if key in cut_names(plan):
                model.get_parameter(key).mul_(change)
        for part in mask.parts:
            part.take_over()
            part.release()
        for piece in held:
            expected = piece.narrow(dense.get_parameter(piece.parameter)) * change
            assert torch.equal(mask.model.views.weight_view(piece), expected), piece
