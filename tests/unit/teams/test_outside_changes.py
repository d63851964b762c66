"""Weights that change between a team's step and the next step of the optimizer."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from sdp_deepspeed.teams.outside_changes import OutsideChanges

CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda _: None,
    "a state dict": lambda model: model.load_state_dict({n: v + 1 for n, v in model.state_dict().items()}),
    "data": lambda model: next(model.parameters()).data.neg_(),
    "another optimizer": lambda _: torch.optim.SGD([nn.Parameter(torch.ones(1))]).step(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_a_change(change: str) -> None:
    model = nn.Linear(3, 4)
    optimizers = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]  # the second sees what one did
    changes = OutsideChanges(lambda: model.parameters())
    for at in range(3):
        changes.note()
        if at == 1:
            CHANGES[change](model)
        model(torch.ones(3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)  # before `note` it is a part of the step
    assert changes.found() == (change in ("a state dict", "data"))


def test_the_hook_ends_with_its_team() -> None:
    gc.collect()  # those of other tests
    before = len(_global_optimizer_pre_hooks)
    changes = OutsideChanges(lambda: [])
    assert len(_global_optimizer_pre_hooks) == before + 1
    del changes
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
