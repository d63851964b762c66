"""Layers that torch's checkpoint_wrapper and torch.compile wrap, on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from sdp_deepspeed.fsdp import CheckpointManager, param_groups
from tests.helpers.models import TOKENS, llama
from tests.helpers.ranks import Rank
from tests.helpers.sharded import check_against_reference, gathered_state, sharded
from tests.helpers.training import refusal

pytestmark = pytest.mark.world(2)
ONE = {"holders": 1}


def test_as_without(rank: Rank) -> None:
    """By torch's checkpoint_wrapper and torch.compile, as in torchtitan: a model without wrappers goes on from it."""

    def wrap(model: Any) -> None:
        layers = model.model.layers
        layers[0] = checkpoint_wrapper(layers[0])
        layers[0].mlp = checkpoint_wrapper(layers[0].mlp)
        layers[1].mlp.up_proj = checkpoint_wrapper(layers[1].mlp.up_proj)
        layers[1] = torch.compile(checkpoint_wrapper(layers[1]), backend="eager")

    for strategy in ("block", {"mlp": "neuron"}):
        model = check_against_reference(rank, llama(), ONE | {"strategy": strategy}, parallelize=wrap)
        assert "_checkpoint_wrapped_module" in model.model.layers[0]._modules
        folder = rank.folder / type(strategy).__name__
        CheckpointManager(model, torch.optim.SGD(param_groups(model))).save_checkpoint(folder)
        other = sharded(llama(), ONE)
        CheckpointManager(other, torch.optim.SGD(param_groups(other))).load_checkpoint(folder, load_module_only=True)
        found, expected = gathered_state(other), gathered_state(model)
        assert list(found) == list(expected) == list(llama().state_dict())
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for wrapper in (checkpoint_wrapper, partial(torch.compile, backend="eager")):
        refusal(ValueError, lambda wrapper=wrapper: sharded(wrapper(llama()), ONE), "the model itself is wrapped")
    reentrant: Any = llama()
    reentrant.model.layers[0] = checkpoint_wrapper(reentrant.model.layers[0], checkpoint_impl=CheckpointImpl.REENTRANT)
    refusal(ValueError, lambda: sharded(reentrant, ONE), "'model.layers.0' uses reentrant")
    by_transformers: Any = llama()
    by_transformers.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    refusal(ValueError, lambda: sharded(by_transformers, ONE), "'model.layers.0'", "uses reentrant")


def test_has_buffers_in_wrappers(rank: Rank) -> None:
    """Put on before and after, around who owns the buffer, and around an ignored parameter."""

    def build() -> Any:
        model: Any = llama()
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.register_buffer("count", torch.full((2,), float(number)))
        return model

    def started(*, before: bool) -> Any:
        model = build()
        ignored = [model.model.norm.weight]
        if before:
            wrap(model)
        model = sharded(model, ONE, ignored_params=ignored)
        if not before:
            wrap(model)
        return model

    def wrap(model: Any) -> None:
        layers = model.model.layers
        model.model.norm = checkpoint_wrapper(model.model.norm)
        layers[0].self_attn = checkpoint_wrapper(layers[0].self_attn)
        layers[1].self_attn = torch.compile(layers[1].self_attn, backend="eager")

    for before in (True, False):
        model, whole = started(before=before), build()
        with torch.no_grad():
            found, expected = (each.eval()(input_ids=TOKENS).logits for each in (model, whole))
        torch.testing.assert_close(found, expected)
        folder = rank.folder / str(before)
        CheckpointManager(model, torch.optim.SGD(param_groups(model))).save_checkpoint(folder)
        other = sharded(build(), ONE)
        with torch.no_grad():
            other.model.layers[rank.rank].self_attn.count.add_(1)
        CheckpointManager(other, torch.optim.SGD(param_groups(other))).load_checkpoint(folder, load_module_only=True)
        for each in (model, other):
            state = gathered_state(each)
            assert list(state) == list(whole.state_dict())
            assert all(torch.equal(state[name], value) for name, value in whole.state_dict().items())
