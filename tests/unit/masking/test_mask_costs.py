"""The work, the memory and the saved activations of a subnetwork are those of what it holds."""

from __future__ import annotations

import gc
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count
from transformers import ResNetConfig, ResNetForImageClassification, SwinConfig, SwinForImageClassification
from transformers.pytorch_utils import Conv1D

from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.architectures.branch import BATCH_NORMS, CONVOLUTIONS
from sdp_deepspeed.architectures.image_flops import flops_per_element
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.plan.plan import Plan
from tests.helpers import models
from tests.helpers.core_masks import MODES, build, masked, plan_of, tokens
from tests.helpers.measured import Products, Saved, counted_attention, matrices

modes = pytest.mark.parametrize(("regime", "strategy"), MODES)
NUM_TOKENS = tokens().numel()


def held_elements(mask: Mask, name: str) -> int:
    return sum(piece.num_elements(mask.shapes[name]) for piece, _ in mask.pieces[name] if mask.is_held(piece))


def passes(model: nn.Module) -> tuple[Products, Products, list[tuple[int, int]]]:
    """Products of the forward pass and of the backward pass, and calls of attention."""
    with counted_attention() as calls, Products() as forward:
        loss = models.loss_of(model, tokens())
    with Products() as backward:
        loss.backward()
    return forward, backward, calls


@pytest.mark.parametrize("strategy", ["block", "neuron"])
@pytest.mark.parametrize("name", ["llama_odd", "gpt2"])
def test_forward_workers_compute_what_they_hold(name: str, strategy: str) -> None:
    """A weight costs 2 FLOPs for a token forward, 2 for its input's gradient and 2 for its own."""
    dense = build(name)
    plan = plan_of(dense, "forward", strategy)
    whole_forward, whole_backward, whole_calls = passes(deepcopy(dense))
    queries, keys = zip(*whole_calls, strict=True)
    weights = matrices(dense)
    total, of_workers = 0, []
    for rank in (0, 1):
        model, mask = masked(dense, plan, rank)
        forward, backward, calls = passes(model)
        held = sum(held_elements(mask, weight) for weight in weights)
        assert (forward.flops, backward.flops) == (2 * NUM_TOKENS * held, 4 * NUM_TOKENS * held)
        if strategy == "neuron":  # one product each
            assert (forward.num_calls, backward.num_calls) == (whole_forward.num_calls, whole_backward.num_calls)
        total += held
        of_workers += calls
    units = {piece.parameter for unit in plan.units for piece in unit.pieces}
    assert total == sum(weight.numel() * (1 if key in units else 2) for key, weight in weights.items())
    assert [sum(heads) for heads in zip(*of_workers, strict=True)] == [sum(queries), sum(keys)]


@pytest.mark.parametrize("strategy", ["block", "neuron"])
@pytest.mark.parametrize("name", ["llama_odd", "gpt2"])
def test_backward_workers_compute_weight_gradients_of_what_they_hold(name: str, strategy: str) -> None:
    """And all else as the dense model does, each layer's attention once."""
    dense = build(name)
    plan = plan_of(dense, "backward", strategy)
    forward, backward, calls = passes(deepcopy(dense))
    for rank in (0, 1):
        model, mask = masked(dense, plan, rank)
        own_forward, own_backward, own_calls = passes(model)
        frozen = sum(weight.numel() - held_elements(mask, key) for key, weight in matrices(dense).items())
        assert own_forward.flops == forward.flops
        assert backward.flops - own_backward.flops == 2 * NUM_TOKENS * frozen > 0
        assert own_calls == calls


@modes
def test_dense_tensors_of_what_is_cut_or_absent_are_gone(regime: str, strategy: str) -> None:
    """Their memory belongs to arrays that can be asked whether they are still there."""

    def backed_by_array(parameter: torch.Tensor) -> weakref.ref[Any]:
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        return weakref.ref(array)

    model = build("gpt2")
    arrays = {name: backed_by_array(parameter) for name, parameter in model.named_parameters()}
    mask = Mask(model, plan_of(model, regime, strategy), 0)
    mask.apply()
    gc.collect()
    absent = {
        name for name, parameter in model.named_parameters() if held_elements(mask, name) < mask.shapes[name].numel()
    }
    assert absent
    is_frozen = (regime, strategy) == ("backward", "block")
    assert {name for name, array in arrays.items() if array() is None} == (set() if is_frozen else absent)
    for name, parameter in model.named_parameters() if not is_frozen else ():
        assert parameter.untyped_storage().nbytes() == 4 * held_elements(mask, name)
        assert parameter.storage_offset() == 0


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


# ---- activations ----------------------------------------------------------------------------------------------------


def saved_of(model: Any, own: Any = None) -> int:
    """Bytes; without a key/value cache, which would copy values."""
    with Saved([*model.parameters()] if own is None else own.tensors()) as saved:
        model(input_ids=tokens(), labels=tokens(), use_cache=False)
    return saved.num_bytes


@pytest.mark.parametrize("name", ["llama_odd", "gpt2"])
def test_backward_neurons_keep_no_inputs_of_frozen_ones(name: str) -> None:
    """Of the MLPs' output projections; attention itself keeps its output."""
    dense = build(name)
    plan = plan_of(dense, "backward", {"mlp": "neuron"})
    for rank in (0, 1):
        model, mask = masked(dense, plan, rank)
        outputs = [tensor.parameter for b in mask.branches for tensor in b.cut_tensors if tensor.cut.is_output]
        absent = sum(piece.length for key in outputs for piece, _ in mask.pieces[key] if not mask.is_held(piece))
        assert saved_of(dense) - saved_of(model, mask) == 4 * NUM_TOKENS * absent > 0


# ---- images: layers at different numbers of positions ---------------------------------------------------------------

ROWS, SIZE, WIDTHS = 3, 32, (12, 24)
aten = torch.ops.aten


def images_model(kind: str) -> Any:
    """Two stages of two and three layers: images of 32 x 32 are 8 x 8 in the first, and 4 x 4 in the second."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"depths": [2, 3], "num_labels": 5, "image_size": SIZE}
    if kind == "swin":
        heads: dict[str, Any] = {"num_heads": [2, 4], "embed_dim": 8, "window_size": 2, "drop_path_rate": 0.0}
        return SwinForImageClassification(SwinConfig(**sizes, **heads)).train()
    resnet: dict[str, Any] = {"embedding_size": 6, "hidden_sizes": list(WIDTHS), "layer_type": kind}
    return ResNetForImageClassification(ResNetConfig(**sizes, **resnet)).train()


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(pixel_values=torch.ones(ROWS, 3, SIZE, SIZE), labels=torch.tensor([0, 1, 4])).loss
    return loss


def measured(model: nn.Module) -> tuple[int, int]:
    """FLOPs of a forward and of a backward pass, products of activations with each other left out."""
    with FlopCounterMode(display=False) as forward:
        loss = loss_of(model)
    with FlopCounterMode(display=False, custom_mapping={aten.convolution_backward: _of_groups}) as backward:
        loss.backward()
    return _of_weights(forward), _of_weights(backward)


def _of_groups(gradient: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """PyTorch's own formula takes groups for one."""
    return conv_flop_count(x, weight, gradient, rest[4]) * sum(rest[7][:2])


def _of_weights(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts()["Global"]
    return sum(count for kind, count in counts.items() if "bmm" not in f"{kind}" and "attention" not in f"{kind}")


def formula(model: nn.Module, plan: Plan, rank: int) -> tuple[int, int, int]:
    """FLOPs of a forward pass: of all weights, of those that `rank` has, of the stem, whose input needs no gradient."""
    per_element = flops_per_element(model)
    assert per_element is not None
    total = {name: int(per_element[name] * parameter.numel()) for name, parameter in model.named_parameters()}
    costs = unit_costs(model, plan.units)
    absent = sum(cost.flops for unit, cost in enumerate(costs) if not plan.holds_rank(unit, rank))
    assert absent
    return ROWS * sum(total.values()), ROWS * (sum(total.values()) - absent), ROWS * total[next(iter(total))]


@modes
@pytest.mark.parametrize("kind", ["bottleneck", "swin"])
def test_workers_on_images_compute_what_their_units_cost(kind: str, regime: str, strategy: str) -> None:
    dense = images_model(kind)
    plan = plan_of(dense, regime, strategy)
    total, held, stem = formula(dense, plan, 1)
    expected = (held, 2 * held - stem) if regime == "forward" else (total, total - stem + held)
    assert measured(masked(dense, plan, 1)[0]) == expected
