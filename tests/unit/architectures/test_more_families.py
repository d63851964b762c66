"""Each family of `more_models` in all modes: a rank computes what the dense model with zeroed pieces computes (forward
regime), or what the dense model computes (backward regime); and the dense model comes back whole."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.core.masking import Mask
from sdp_deepspeed.plan.tensors import named_tensors
from sdp_deepspeed.units import Piece
from tests.helpers import models
from tests.helpers.masked_modules import (
    RANKS,
    assert_close,
    assert_same_as_zeroed,
    held_pieces,
    infos,
    loss_and_gradients,
    masked,
    plan_of,
    tokens,
)
from tests.helpers.more_models import SPECIMENS, UNCUT
from tests.helpers.rank_models import mask_of

LAYER = {"granularity": "layer"}


def build(name: str) -> Any:
    return deepcopy(_built(name))


@cache
def _built(name: str) -> nn.Module:
    return models.scrambled(SPECIMENS[name].build())


def neuron_strategy(name: str) -> Any:
    return {"attention": "block", "mlp": "neuron"} if name in UNCUT else "neuron"


def assert_gradients(
    mask: Mask,
    pieces: Mapping[str, list[Piece]],
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
) -> None:
    """Of all that is held or shared; what nothing read (a norm whose branches are all lacking) has zero or none. To
    rounding of what is added up, which may cancel (biases of keys): a 64th of the largest gradient, if that is more."""
    floor = max(float(gradient.abs().max()) for gradient in expected.values()) / 64
    assert found.keys() <= {name for name, held in pieces.items() if held}
    for name, held in pieces.items():
        if name not in found:
            assert all(not piece.narrow(expected[name]).any() for piece in held if name in expected), name
            continue
        for piece in held:
            largest = max(floor, float(expected[name].abs().max()))
            assert_close(mask.model.views.view_in(piece, found[name]), piece.narrow(expected[name]), largest=largest)


assert_as_zeroed = partial(assert_same_as_zeroed, assert_gradients=assert_gradients)


@pytest.mark.parametrize("name", SPECIMENS)
def test_forward_block_is_zeroed(name: str) -> None:
    dense = build(name)
    plan = plan_of(dense, strategy="block")
    parts = [branch.description.name for branch in locate_branches(dense) if branch.is_bypassed]
    num_blocks = SPECIMENS[name].num_blocks or {True: 13, False: 4}["cross_attention" in parts]
    assert len(plan.units) == len(parts) == num_blocks
    for rank in RANKS:
        assert_as_zeroed(dense, plan, rank)
    assert_as_zeroed(dense, plan_of(dense, strategy="block", **LAYER), 0)


@pytest.mark.parametrize("name", SPECIMENS)
def test_forward_neuron_is_zeroed(name: str) -> None:
    dense = build(name)
    for rank in RANKS:
        assert_as_zeroed(dense, plan_of(dense, strategy=neuron_strategy(name)), rank)


@pytest.mark.parametrize("name", SPECIMENS)
def test_backward_is_dense(name: str) -> None:
    dense = build(name)
    expected_loss, expected = loss_and_gradients(deepcopy(dense).train(), tokens())
    for rank, strategy in ((0, "block"), (0, neuron_strategy(name)), (1, neuron_strategy(name))):
        plan = plan_of(dense, "backward", strategy)
        model, mask = masked(dense, plan, rank)
        loss, gradients = loss_and_gradients(model.train(), tokens())
        assert_close(loss, expected_loss)
        assert_gradients(mask, held_pieces(dense, plan, rank), gradients, expected)
        assert (
            gradients.keys() == {key for key, held in held_pieces(dense, plan, rank).items() if held} & expected.keys()
        )


@pytest.mark.parametrize("name", SPECIMENS)
def test_what_is_lacking_has_no_storage_and_what_is_in_no_unit_is_a_norm(name: str) -> None:
    dense = build(name)
    plan = plan_of(dense, strategy="block")
    inside = {piece.parameter for branch in locate_branches(dense) for piece in branch.pieces}
    shared = {key for key, _ in dense.named_parameters() if any(part.isdigit() for part in key.split("."))} - inside
    # T5's first self-attention makes a bias that all layers need. ResNet's projections, and its head.
    others = ("block.0.layer.0.", "downsample.reduction.", "downsampling_layer.", ".shortcut.", "classifier.")
    assert all("norm" in key.lower() or any(other in key for other in others) for key in shared), shared
    for rank in RANKS:
        lacking = {
            piece.parameter
            for index, unit in enumerate(plan.units)
            if not plan.holds_rank(index, rank)
            for piece in unit.pieces
        }
        for key, parameter in masked(dense, plan, rank)[0].named_parameters():
            # One element stands for all of a layer's own parameter.
            assert (parameter.untyped_storage().nbytes() <= parameter.element_size()) == (key in lacking), key
            assert parameter.requires_grad == (key not in lacking), key


# What else a module keeps or hands on in a pass: several bodies, arguments by head, dropout at the end, narrow configs.
@pytest.mark.parametrize("name", ["bert", "falcon_grouped", "gemma2", "opt", "phi", "phi3", "starcoder2", "t5"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.slow
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    dense = build(name)
    for regime, strategy in (("forward", "block"), ("forward", "neuron"), ("backward", "neuron")):
        plan = plan_of(dense, regime, strategy)
        expected_loss, expected = loss_and_gradients(masked(dense, plan, 0)[0].train(), tokens())
        model, _ = masked(dense, plan, 0)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        loss, gradients = loss_and_gradients(model.train(), tokens())
        assert_close(loss, expected_loss)
        assert gradients.keys() == expected.keys()
        for (
            key
        ) in expected:  # not their bits: layers may add to a common tensor's (T5's position bias) in another order
            assert_close(gradients[key], expected[key])


@pytest.mark.parametrize("name", SPECIMENS)
@pytest.mark.slow
def test_the_dense_model_comes_back_whole_and_loads_without_us(name: str, tmp_path: Path) -> None:
    """And what was lent is given back; a copy of a subnetwork is that subnetwork."""
    dense = build(name).eval()
    tensors = named_tensors(dense)

    def fetch(targets: Mapping[Piece, torch.Tensor]) -> None:
        for piece, target in targets.items():
            target.copy_(piece.narrow(tensors[piece.parameter].detach()))

    with torch.no_grad():
        expected = models.loss_of(dense, tokens())
        for strategy in ("block", neuron_strategy(name)):
            model, mask = masked(dense, plan_of(dense, strategy=strategy), 0)
            own = models.loss_of(model.eval(), tokens())
            assert not torch.equal(own, expected)
            assert torch.equal(models.loss_of(deepcopy(model), tokens()), own)
            for part in mask.parts:
                part.fill(fetch)
            assert torch.equal(models.loss_of(model, tokens()), expected)
            if strategy == "block":
                model.save_pretrained(tmp_path, state_dict=model.state_dict())
                loaded = type(dense).from_pretrained(tmp_path)
                assert torch.equal(models.loss_of(loaded.eval(), tokens()), expected)
            for part in mask.parts:
                part.release()
            assert torch.equal(models.loss_of(model, tokens()), own)


@pytest.mark.parametrize("name", SPECIMENS)
@pytest.mark.slow
def test_dropout_between_a_lacking_branch_and_its_addition(name: str) -> None:
    specimen = SPECIMENS[name]
    sizes = dict(specimen.options)
    config = specimen.config(**sizes)
    rates = {key for key in vars(config) if ("dropout" in key or "pdrop" in key) and "classifier" not in key}
    model = specimen.model(specimen.config(**sizes | dict.fromkeys(rates, 0.3)))
    for regime, strategy in (
        ("forward", "block"),
        ("forward", neuron_strategy(name)),
        ("backward", neuron_strategy(name)),
    ):
        subnetwork = masked(model, plan_of(model, regime, strategy), 1)[0].train()
        (one, gradients), (other, _) = (
            loss_and_gradients(subnetwork, tokens()),
            loss_and_gradients(subnetwork, tokens()),
        )
        assert regime == "forward" or (one != other) == bool(rates)  # forward, a rank may lack all that drops
        assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_dropout_at_the_end_of_a_body_runs_once_on_the_sum_of_its_halves() -> None:
    """So that the same seed drops the same as in the dense model."""
    specimen = SPECIMENS["starcoder2"]
    dense = specimen.model(specimen.config(**{**specimen.options, "residual_dropout": 0.5})).train()
    torch.manual_seed(3)
    expected = models.loss_of(dense, tokens())
    assert not torch.isclose(expected, models.loss_of(dense, tokens()))
    model, _ = masked(dense, plan_of(dense, "backward"), 0)
    torch.manual_seed(3)
    assert_close(models.loss_of(model.train(), tokens()), expected)


@pytest.mark.parametrize(
    ("name", "regime", "strategy"),
    [("falcon_grouped", "forward", "block"), ("opt", "forward", "block"), ("opt", "backward", "neuron")],
)
@pytest.mark.slow
def test_compilers_follow(name: str, regime: str, strategy: str) -> None:
    """What is added in place, dropped by a function, or kept from one body for another."""
    dense = build(name)
    plan = plan_of(dense, regime, strategy)
    expected_loss, expected = loss_and_gradients(masked(dense, plan, 0)[0].train(), tokens(), use_cache=False)
    compiled = torch.compile(masked(dense, plan, 0)[0].train(), backend="eager", fullgraph=True)
    loss, gradients = loss_and_gradients(compiled, tokens(), use_cache=False)
    assert torch.equal(loss, expected_loss)
    assert {key.removeprefix("_orig_mod.") for key in gradients} == expected.keys()
    for key, gradient in gradients.items():
        assert_close(gradient, expected[key.removeprefix("_orig_mod.")])


@pytest.mark.parametrize("strategy", ["block", "neuron"])
@pytest.mark.parametrize("name", ["gemma2", "glm4"])
def test_a_scale_that_a_norm_would_undo_is_refused(name: str, strategy: str) -> None:
    model = build(name)
    plan = plan_of(model, strategy=strategy)
    with pytest.raises(ValueError, match=r"dense_branch_scale: .*norm \(.*Norm\) normalizes.*layers\.0\.attention"):
        mask_of(model, locate_branches(model), infos(model), plan, 0, scales=True)


@pytest.mark.parametrize("name", UNCUT)
def test_heads_that_cannot_be_cut_are_refused_with_the_line_that_works(name: str) -> None:
    with pytest.raises(
        ValueError, match=r'attention.* cannot be cut: .*"strategy": \{"attention": "block", "mlp": "neuron"\}'
    ):
        plan_of(build(name))
