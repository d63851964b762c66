"""The memory, the FLOPs and the saved activations of a subnetwork are those of what it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from sdp_deepspeed.architectures.branch import BATCH_NORMS, CONVOLUTIONS
from sdp_deepspeed.config import MODES
from sdp_deepspeed.plan.strategies import unit_costs
from sdp_deepspeed.units import Regime
from tests.helpers.core_masks import build, masked, plan_of, run, tokens

modes = pytest.mark.parametrize(("regime", "strategy"), MODES)
NUM_TOKENS = tokens().numel()


def says(layer: Any) -> tuple[int, ...]:
    """Widths, in the order of its weight's dimensions."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    if isinstance(layer, CONVOLUTIONS):
        return layer.out_channels, layer.in_channels
    return (layer.num_features,) if isinstance(layer, BATCH_NORMS) else (layer.out_features, layer.in_features)


@pytest.mark.parametrize("regime", ["forward", "backward"])
@pytest.mark.parametrize("name", ["llama_odd", "gpt2", "resnet_bottleneck"])
def test_layers_are_stock_modules_that_say_how_wide_they_are(name: str, regime: Regime) -> None:
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


# ---- FLOPs and activations ------------------------------------------------------------------------------------------


def flops_of(model: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run(model)
    return int(counter.get_total_flops())


def saved_of(model: Any, own: Any = None) -> int:
    """Bytes that autograd keeps beside the model's own tensors; without a key/value cache, which would copy values."""
    ignored = {tensor.untyped_storage().data_ptr() for tensor in (model.parameters() if own is None else own.tensors())}
    kept: list[torch.Tensor] = []  # so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=tokens(), labels=tokens(), use_cache=False)
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for address, size in sizes.items() if address not in ignored)


@modes
@pytest.mark.parametrize("name", ["llama_odd", "gpt2"])
def test_absent_units_cost_no_flops_and_no_inputs_of_frozen_neurons_are_kept(
    name: str, regime: Regime, strategy: str
) -> None:
    """Of MLPs: neither the forward pass nor the two products of the backward pass; in the backward regime all but the
    gradient of weights. Inputs of the MLPs' output projections; attention itself keeps its output."""
    dense = build(name)
    plan = plan_of(dense, regime, {"mlp": strategy})
    costs = [cost.flops * NUM_TOKENS for cost in unit_costs(dense, plan.units)]
    for rank in (0, 1):
        model, mask = masked(dense, plan, rank)
        if (regime, strategy) == ("backward", "neuron"):
            outputs = [tensor.parameter for b in mask.branches for tensor in b.cut_tensors if tensor.cut.is_output]
            frozen = sum(piece.length for key in outputs for piece, _ in mask.pieces[key] if not mask.is_held(piece))
            assert saved_of(dense) - saved_of(model, mask) == 4 * NUM_TOKENS * frozen > 0
        absent = sum(cost for index, cost in enumerate(costs) if not plan.holds(index, rank))
        assert flops_of(dense) - flops_of(model) == (3 if regime == "forward" else 1) * absent > 0
