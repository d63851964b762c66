"""Backward masking, block strategy: the dense model's loss and gradients, with the work and memory of what is held."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, locate_branches
from sdp_deepspeed.plan.plan import Plan
from tests.helpers.masked_modules import (
    NAMES,
    NUM_TOKENS,
    RANKS,
    build,
    flops,
    held_pieces,
    layer_of,
    linear_weights,
    loss_and_gradients,
    masked,
    plan_of,
    saved_of,
    tokens,
)


def lacking_branches(model: nn.Module, plan: Plan, rank: int) -> list[LocatedBranch]:
    names = {unit.name for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)}
    return [branch for branch in locate_branches(model) if branch.name in names]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("granularity", ["sublayer", "layer"])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_exact(name: str, granularity: str, rank: int) -> None:
    """The same operations in the same order: the same bits."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward", "block", granularity=granularity)
    expected_loss, expected = loss_and_gradients(deepcopy(dense), tokens())
    model, _ = masked(dense, plan, rank)
    loss, gradients = loss_and_gradients(model, tokens())
    pieces = held_pieces(dense, plan, rank)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == {key for key, held in pieces.items() if held}
    assert len(gradients) < len(expected)
    for key, gradient in gradients.items():
        assert torch.equal(gradient, expected[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_blocks_skip_weight_gradients_only(name: str) -> None:
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward", "block")
    forward, backward = flops(deepcopy(dense))
    for rank in RANKS:
        own_forward, own_backward = flops(masked(dense, plan, rank)[0])
        lacking = linear_weights(dense) - linear_weights(dense, held_pieces(dense, plan, rank))
        assert lacking > 0
        assert own_forward.flops == forward.flops == 2 * NUM_TOKENS * linear_weights(dense)
        assert backward.flops - own_backward.flops == 2 * NUM_TOKENS * lacking


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_blocks_keep_no_activations_for_lacking_weights(name: str, rank: int) -> None:
    """Inputs of a lacking branch's linear layers are not kept; an MLP's output projection is the only reader of its."""
    dense = build(name, num_layers=2)
    plan = plan_of(dense, "backward", "block")
    model, _ = masked(dense, plan, rank)
    inputs = inputs_of(model)
    saved, whole = saved_of(model), saved_of(dense)
    lacking = lacking_branches(dense, plan, rank)
    fewer = 0
    for branch in locate_branches(dense):
        first, last = inputs[layer_of(branch, 0)], inputs[layer_of(branch, -1)]
        assert whole.has(first)
        assert whole.has(last)
        assert saved.has(first) == (branch not in lacking)
        if branch.description.name == "mlp":
            assert saved.has(last) == (branch not in lacking)
        fewer += first.nbytes * (branch in lacking) + last.nbytes * (
            branch in lacking and branch.description.name == "mlp"
        )
    assert whole.num_bytes - saved.num_bytes >= fewer > 0


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Filled by the next forward pass: the input of each module that has weights."""
    found: dict[str, torch.Tensor] = {}
    for key, module in model.named_modules():
        if hasattr(module, "weight"):
            module.register_forward_pre_hook(lambda _, args, key=key: found.update({key: args[0].detach()}))
    return found


def test_a_lacking_mlp_in_bytes() -> None:
    """Llama: its norm keeps the normalized input for its weight, gate and up share their input, down has its own."""
    dense: Any = build("llama", num_layers=1)
    plan = plan_of(dense, "backward", "block")
    hidden, inner = dense.config.hidden_size, dense.config.intermediate_size
    found = []
    for rank in RANKS:
        branch = lacking_branches(dense, plan, rank)[0]
        less = saved_of(deepcopy(dense)).num_bytes - saved_of(masked(dense, plan, rank)[0]).num_bytes
        assert less == 4 * NUM_TOKENS * (2 * hidden + (inner if branch.description.name == "mlp" else 0))
        found.append(branch.description.name)
    assert sorted(found) == ["attention", "mlp"]
