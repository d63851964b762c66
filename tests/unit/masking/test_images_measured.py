"""Convolutional and hierarchical models as workers have them: FLOPs and saved bytes are what the units' figures say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
)

from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.architectures.image_flops import flops_per_element
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.masked_modules import NUM_GROUPS, RANKS, Saved, masked, plan_of

pytestmark = pytest.mark.slow

aten = torch.ops.aten
ROWS, SIZE, WIDTHS = 3, 32, (12, 24)
STRATEGIES = ("block", "neuron")


def build(kind: str) -> Any:
    """Two stages of two and three layers: images of 32 x 32 are 8 x 8 in the first, and 4 x 4 in the second."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"depths": [2, 3], "num_labels": 5, "image_size": SIZE}
    if kind == "swin":
        heads: dict[str, Any] = {"num_heads": [2, 4], "embed_dim": 8, "window_size": 2, "drop_path_rate": 0.0}
        return SwinForImageClassification(SwinConfig(**sizes, **heads)).train()
    if kind == "convnext":
        config = ConvNextConfig(**sizes, hidden_sizes=list(WIDTHS), num_stages=2)
        return ConvNextForImageClassification(config).train()
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
    return sum(_of_weights(forward).values()), sum(_of_weights(backward).values())


def _of_groups(gradient: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """PyTorch's own formula takes groups for one."""
    return conv_flop_count(x, weight, gradient, rest[4]) * sum(rest[7][:2])


def _of_weights(counter: FlopCounterMode) -> dict[Any, int]:
    counts = counter.get_flop_counts()["Global"]
    return {kind: count for kind, count in counts.items() if "bmm" not in f"{kind}" and "attention" not in f"{kind}"}


def formula(model: nn.Module, plan: Plan, rank: int) -> tuple[int, int, int]:
    """FLOPs of a forward pass: of all weights, of those that `rank` has, of the stem, whose input needs no gradient."""
    per_element = flops_per_element(model)
    assert per_element is not None
    total = {name: int(per_element[name] * parameter.numel()) for name, parameter in model.named_parameters()}
    costs = unit_costs(model, plan.units)
    lacking = sum(cost.flops for unit, cost in enumerate(costs) if not plan.holds_rank(unit, rank))
    assert lacking
    stem = next(iter(total))
    return ROWS * sum(total.values()), ROWS * (sum(total.values()) - lacking), ROWS * total[stem]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["basic", "bottleneck", "swin", "convnext"])
def test_forward_workers_compute_what_their_units_cost(kind: str, strategy: str, rank: int) -> None:
    """A weight's product costs as much again for its gradient, and for that of its input."""
    dense = build(kind)
    plan = plan_of(dense, "forward", strategy)
    _, held, stem = formula(dense, plan, rank)
    assert measured(masked(dense, plan, rank)[0]) == (held, 2 * held - stem)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["basic", "bottleneck", "swin", "convnext"])
def test_backward_workers_compute_gradients_of_their_own_weights(kind: str, strategy: str, rank: int) -> None:
    dense = build(kind)
    plan = plan_of(dense, "backward", strategy)
    total, held, stem = formula(dense, plan, rank)
    assert measured(masked(dense, plan, rank)[0]) == (total, total - stem + held)


def saved_bytes(model: nn.Module) -> int:
    with Saved([*model.parameters(), *model.buffers()]) as saved:
        loss_of(model)
    return saved.num_bytes


@pytest.mark.parametrize("rank", RANKS)
def test_saved_bytes_of_blocks_by_hand(rank: int) -> None:
    """Of a basic block what its convolutions put out and the activation between them, and of each norm a mean and a
    deviation for each channel; its input and what follows the addition are the stream's."""
    dense = build("basic")
    plan = plan_of(dense, "forward", "block")
    lacking = [unit.name for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)]
    stages = [int(name.split(".")[3]) for name in lacking]
    sides = (SIZE // 4, SIZE // 8)
    expected = sum(3 * ROWS * WIDTHS[stage] * sides[stage] ** 2 + 4 * WIDTHS[stage] for stage in stages) * 4
    assert saved_bytes(dense) - saved_bytes(masked(dense, plan, rank)[0]) == expected


@pytest.mark.parametrize("rank", RANKS)
def test_saved_bytes_of_inner_channels_by_hand(rank: int) -> None:
    """Of each lacking channel what the first convolution puts out, and the activation of it; mean and deviation."""
    dense = build("basic")
    plan = plan_of(dense, "forward", "neuron")
    expected = 0
    for index, unit in enumerate(plan.units):
        if not plan.holds_rank(index, rank):
            channels = next(piece.length for piece in unit.pieces if piece.parameter.endswith("0.convolution.weight"))
            side = (SIZE // 4, SIZE // 8)[int(unit.name.split(".")[3])]
            expected += 4 * channels * (2 * ROWS * side**2 + 2)
    assert len(plan.units) == NUM_GROUPS * 5
    assert saved_bytes(dense) - saved_bytes(masked(dense, plan, rank)[0]) == expected


@pytest.mark.parametrize("rank", RANKS)
def test_saved_bytes_of_swin_by_hand(rank: int) -> None:
    """Of an MLP for each position what its norm takes and gives, mean and deviation there, and twice its four times as
    many neurons, before and after the activation."""
    dense = build("swin")
    plan = plan_of(dense, "forward", {"mlp": "block"})
    expected = 0
    for index, unit in enumerate(plan.units):
        if not plan.holds_rank(index, rank):
            stage = int(unit.name.split(".")[3])
            width, positions = 8 * 2**stage, ROWS * (SIZE // 4 // 2**stage) ** 2
            expected += 4 * positions * (2 * width + 2 + 2 * 4 * width)
    assert saved_bytes(dense) - saved_bytes(masked(dense, plan, rank)[0]) == expected > 0
