"""Layers that torch's checkpoint_wrapper and torch.compile wrap, on two ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from sdp_deepspeed.fsdp import CheckpointManager, param_groups
from tests.helpers.models import llama
from tests.helpers.ranks import Rank
from tests.helpers.sharded import check_against_reference, gathered_state, sharded
from tests.helpers.training import refusal

pytestmark = pytest.mark.world(2)
ONE = {"holders": 1}


def build() -> Any:
    """With a buffer in what is wrapped."""
    model: Any = llama()
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_buffer("count", torch.full((2,), float(number)))
    return model


def test_as_without(rank: Rank) -> None:
    """By torch's checkpoint_wrapper and torch.compile, as in torchtitan: a model without wrappers goes on from it."""

    def wrap(model: Any) -> None:
        layers = model.model.layers
        layers[0] = checkpoint_wrapper(layers[0])
        layers[0].mlp = checkpoint_wrapper(layers[0].mlp)
        layers[1].mlp.up_proj = checkpoint_wrapper(layers[1].mlp.up_proj)
        layers[1] = torch.compile(checkpoint_wrapper(layers[1]), backend="eager")

    for strategy in ("block", {"mlp": "neuron"}):
        model = check_against_reference(rank, build(), ONE | {"strategy": strategy}, parallelize=wrap)
        assert "_checkpoint_wrapped_module" in model.model.layers[0]._modules
        folder = rank.folder / type(strategy).__name__
        CheckpointManager(model, torch.optim.SGD(param_groups(model))).save_checkpoint(folder)
        other = sharded(build(), ONE)
        for layer in other.model.layers:
            layer.self_attn.count.add_(rank.rank + 1)
        CheckpointManager(other, torch.optim.SGD(param_groups(other))).load_checkpoint(folder, load_module_only=True)
        found, expected = gathered_state(other), gathered_state(model)
        assert list(found) == list(expected) == list(build().state_dict())
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for wrapper in (checkpoint_wrapper, partial(torch.compile, backend="eager")):
        refusal(ValueError, lambda wrapper=wrapper: sharded(wrapper(llama()), ONE), "the model itself is wrapped")
    reentrant: Any = llama()
    reentrant.model.layers[0] = checkpoint_wrapper(reentrant.model.layers[0], checkpoint_impl=CheckpointImpl.REENTRANT)
    refusal(ValueError, lambda: sharded(reentrant, ONE), "'model.layers.0' uses reentrant")
    few: Any = llama(1)
    few.model.layers[0] = checkpoint_wrapper(few.model.layers[0])
    refusal(ValueError, lambda: sharded(few, ONE | {"granularity": "layer"}), "unit")
    assert "_checkpoint_wrapped_module" in few.model.layers[0]._modules, "as it was"
    by_transformers: Any = llama()
    by_transformers.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    refusal(ValueError, lambda: sharded(by_transformers, ONE), "'model.layers.0'", "uses reentrant")
