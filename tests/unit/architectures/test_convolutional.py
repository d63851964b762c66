"""ResNets: which branches are blocks, which are shared, and what batch norms' buffers do."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from sdp_deepspeed.masking.mask import members_of
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, locate_branches, registry, units_of_branches
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.convolutional_models import KINDS, build
from tests.helpers.masked_modules import (
    RANKS,
    assert_same_as_zeroed,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)

BLOCKS = [f"resnet.encoder.stages.{stage}.layers.{layer}.convolution" for stage, layer in ((0, 1), (1, 1), (1, 2))]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_an_identity_bypasses(kind: str) -> None:
    model = build(kind)
    branches = locate_branches(model)
    assert [branch.name for branch in branches if branch.is_bypassed] == BLOCKS
    for granularity in ("sublayer", "layer"):
        units = units_of_branches(branches, strategy="block", granularity=granularity)
        assert [unit.name.removesuffix(".convolution") for unit in units] == [
            name.removesuffix(".convolution") for name in BLOCKS
        ]
        kinds = {(piece.parameter.rpartition(".")[2], piece.kind) for piece in units[0].pieces}
        assert {name for name, of in kinds if of == "buffer"} == {"running_mean", "running_var", "num_batches_tracked"}


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_block_is_zeroed(kind: str, activation: str) -> None:
    dense = build(kind, hidden_act=activation)
    for granularity in ("sublayer", "layer"):
        plan = plan_of(dense, strategy="block", granularity=granularity)
        for rank in RANKS:
            assert_same_as_zeroed(dense, plan, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_block_is_dense_and_all_statistics_move(kind: str) -> None:
    dense = build(kind)
    plan = plan_of(dense, "backward", "block")
    module, _ = masked(dense, plan, 0)
    expected_loss, expected = loss_and_gradients(dense, tokens())
    loss, gradients = loss_and_gradients(module, tokens())
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
    assert len(gradients) < len(expected)
    buffers = dict(dense.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())


def test_buffers_of_lacking_blocks_have_no_storage_and_the_others_move_as_in_the_dense_model() -> None:
    dense = build("basic")
    plan = plan_of(dense, strategy="block")
    lacking = {
        piece.parameter
        for index, unit in enumerate(plan.units)
        if not plan.holds_rank(index, 0)
        for piece in unit.pieces
        if piece.kind == "buffer"
    }
    module, mask = masked(dense, plan, 0)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    loss_and_gradients(module, tokens())
    for name, buffer in module.named_buffers():
        assert (name in lacking) == (buffer.untyped_storage().nbytes() == 0), name
        assert name in lacking or not torch.equal(buffer, before[name]), name
    for part in mask.parts:
        part.fill(lambda targets: None)
    assert {name: b.shape for name, b in module.named_buffers()} == {n: b.shape for n, b in dense.named_buffers()}


def test_a_model_without_a_block_is_refused() -> None:
    model = build("basic", depths=[1, 1])
    with pytest.raises(ValueError, match=r"strategy: no branch of the model can be a block.*\"neuron\""):
        units_of_branches(locate_branches(model), strategy="block")


def test_a_plan_whose_block_is_bypassed_by_a_projection_is_refused() -> None:
    branches = locate_branches(build("basic"))
    with pytest.raises(ValueError, match="each bypassed by an identity"):
        members_of(Unit("stem", branches[0].pieces), branches)
    assert members_of(Unit("block", branches[1].pieces), branches) == [branches[1]]
    with pytest.raises(ValueError, match="left over"):
        members_of(Unit("block", (*branches[1].pieces, Piece("more"))), branches)


class Skipping(nn.Module):
    """`skip(x) + body(x)`."""

    def __init__(self, skip: nn.Module) -> None:
        super().__init__()
        self.skip, self.body = skip, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.skip(x) + self.body(x)
        return result


def test_conditions_may_be_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    model = nn.Sequential(Skipping(nn.Identity()), Skipping(nn.Linear(4, 4)), Skipping(nn.Tanh()))
    skips = (("skip", nn.Linear),), (("skip", nn.Identity),)
    first = Branch("body", body="body", when=skips[0], bypassed=skips[1])
    architectures.register(Skipping, first, Branch("body", body="body", when=skips[1], bypassed=skips[1]))
    assert [branch.is_bypassed for branch in locate_branches(deepcopy(model[:2]))] == [True, False]
    with pytest.raises(ValueError, match="known are skip = a Linear; skip = a Identity"):
        locate_branches(model)
    architectures.register(Skipping, Branch("body", body="body", bypassed=(("shortcut", nn.Identity),)))
    with pytest.raises(ValueError, match=r"`bypassed`.*that this one lacks"):
        locate_branches(model)
