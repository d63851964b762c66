"""How a split body runs: in order, once at its end, and as users have set it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import models, more_models
from tests.helpers.masked_modules import assert_close, build, loss_and_gradients, tokens
from tests.helpers.split_models import held_tensors, overlapping_plan, split, split_in_place


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama_biases", "gpt2"])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    dense = build(name, num_layers=2)
    plan = overlapping_plan(dense)
    expected_loss, expected = loss_and_gradients(split(dense, plan, 0)[0], tokens())
    module, _ = split(dense, plan, 0)
    module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    loss, gradients = loss_and_gradients(module.train(), tokens())
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["llama", "gpt_neox_parallel", "qwen3"])
def test_pieces_run_in_order_and_back(name: str) -> None:
    """The order that all ranks share: of branches and, in each, of sets of holders."""
    dense = build(name, num_layers=2)
    module, branches = split(dense, overlapping_plan(dense), 0)
    positions = [(number, piece) for number, branch in enumerate(branches) for piece in branch.held]
    forward, backward = [], []

    def watch(position: tuple[int, int], piece: nn.Module) -> None:
        piece.register_forward_pre_hook(lambda *_: forward.append(position))
        piece.register_full_backward_hook(lambda *_: backward.append(position))

    for number, branch in enumerate(branches):
        for piece in branch.held:
            watch((number, piece), branch.pieces[piece])
    loss_and_gradients(module, tokens())
    assert forward == positions
    assert backward == positions[::-1]


def test_dropout_at_the_end_runs_once_on_the_sum() -> None:
    dense: Any = build("gpt2")
    module, branches = split(dense, overlapping_plan(dense), 0)
    runs = []
    for body in (module.transformer.h[0].attn, module.transformer.h[0].mlp):
        dropout = body.resid_dropout if hasattr(body, "resid_dropout") else body.dropout
        dropout.p = 0.5
        dropout.register_forward_hook(lambda _, inputs, output: runs.append((inputs[0], output)))
    module.train()
    loss_and_gradients(module, tokens())
    assert len(runs) == 2
    for before, after in runs:
        assert torch.equal(after, torch.where(after == 0, 0, 2 * before))
    assert all(len(branch.held) > 1 for branch in branches)


@pytest.mark.parametrize("training", [True, False])
def test_pieces_are_in_the_mode_of_their_body(training: bool) -> None:
    """They are no children of it while it is dense, when its mode may have changed."""
    dense: Any = build("gpt2")
    module, branches = split(dense, overlapping_plan(dense), 0)
    module.train(not training)
    for branch in branches:
        branch.body.training = training
    module(input_ids=tokens())
    pieces = [branch.pieces[number] for branch in branches for number in branch.held]
    assert pieces
    assert all(inner.training is training for piece in pieces for inner in piece.modules())


def test_dropout_of_a_rate() -> None:
    dense: Any = models.scrambled(more_models.SPECIMENS["starcoder2"].build())
    module, _ = split(dense, overlapping_plan(dense), 0)
    module.train()
    layer, x = module.model.layers[0].mlp, torch.randn(2, 24)
    expected, layer.residual_dropout = layer(x), 0.5
    dropped = layer(x)
    assert torch.equal(dropped, torch.where(dropped == 0, 0, 2 * expected))
    assert 0 < (dropped == 0).sum() < dropped.numel()


def test_a_cache_that_is_empty_is_left_out_and_another_is_refused() -> None:
    from transformers import DynamicCache

    dense: Any = build("llama")
    module, _ = split(dense, overlapping_plan(dense), 0)
    cache = DynamicCache(config=dense.config)
    module(input_ids=tokens(), past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"attention.*runs in pieces.*no cache.*dense model"):
        module(input_ids=tokens(), past_key_values=cache)


def test_what_users_set_stays() -> None:
    """Frozen parameters, notes on them, hooks, a bound forward; and later changes of the body hold for its pieces."""
    dense: Any = build("llama_biases")
    before = deepcopy(dense)
    before.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before.model.layers[0].mlp.down_proj.weight.no_decay = True
    module, branches = split_in_place(before, overlapping_plan(dense), 0)
    mlp, runs = module.model.layers[0].mlp, []
    pieces: list[Any] = [branches[1].pieces[number] for number in branches[1].held]
    assert not any(piece.up_proj.weight.requires_grad for piece in pieces)
    assert all(piece.down_proj.weight.no_decay for piece in pieces)
    assert all(isinstance(piece, type(dense.model.layers[0].mlp)) for piece in (mlp, *pieces))
    for model in (module, dense):
        model.model.layers[0].self_attn.scaling = 0.125
    mlp.register_forward_hook(lambda *_: runs.append(1))
    assert_close(models.loss_of(module, tokens()), models.loss_of(dense, tokens()))
    assert len(runs) == 1


def test_on_the_meta_device_nothing_has_storage() -> None:
    dense = build("gpt2").to("meta")
    module, branches = split(dense, overlapping_plan(dense), 1)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    for tensor in held_tensors(branches):
        assert module.get_parameter(tensor.name).shape == tensor.shape(dense.get_parameter(tensor.dense_name).shape)
