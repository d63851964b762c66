"""Wrappers are off while a model is sharded, and on again afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from sdp_deepspeed.fsdp.wrappers import without_wrappers


def test_names_are_those_without_wrappers() -> None:
    inner = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    model = nn.Sequential(offload_wrapper(checkpoint_wrapper(inner)), nn.Linear(2, 2))
    outer, names = model[0], [name for name, _ in model.named_modules()]
    with without_wrappers(model):
        assert [name for name, _ in model.named_modules()] == ["", "0", "0.0", "0.1", "1"]
        assert model[0] is inner
    assert model[0] is outer
    assert [name for name, _ in model.named_modules()] == names


def test_what_has_become_of_a_module_is_wrapped() -> None:
    """Also after an error."""
    model, other = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))), nn.Linear(2, 2)
    wrapper = model[0]

    def replace() -> None:
        with without_wrappers(model):
            model[0] = other
            raise RuntimeError

    with pytest.raises(RuntimeError):
        replace()
    assert model[0] is wrapper
    assert list(wrapper.children()) == [other]


def test_which_are_wrapped_and_what_is_gone() -> None:
    """A module that was taken away leaves its wrapper off, and others come back."""
    twice = nn.Linear(2, 2)
    compiled: Any = torch.compile(twice, backend="eager")
    model = nn.Sequential(compiled, checkpoint_wrapper(nn.Linear(2, 2)), twice)
    wrapper = model[1]
    with without_wrappers(model) as wrapped:
        assert wrapped == ["0", "1", "2"]
        del model._modules["0"]
    assert model._modules == {"1": wrapper, "2": twice}
