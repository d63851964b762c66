"""Copies of an engine's module, weights that somebody changed, and Parameters that somebody replaced."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from tests.helpers.dense_views import CHOICES, batch_of, engine_with, held_copies, logits
from tests.helpers.live_tensors import present_lacking
from tests.helpers.models import config, llama, loss_of
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.slow

SIZE = 3


def copies_are_independent(rank: Rank) -> None:
    """Outside a copy is the subnetwork, also in evaluation; in a view it is the dense model, plain and trainable."""
    for regime, strategy in (*CHOICES, ("forward", "block")):
        model = llama()
        engine = engine_with(model, regime=regime, strategy=strategy)
        train(engine, num_steps=1)
        whole, batch, stays = dense_state(engine), batch_of(rank), held_copies(engine)
        subnetwork = deepcopy(engine.module)
        if regime == "forward":
            assert torch.equal(loss_of(subnetwork, batch), loss_of(engine, batch))
        found = logits(subnetwork.eval(), batch)  # on its own: no rank waits for another
        if rank.rank == 0:
            assert torch.equal(logits(subnetwork, batch), found)
        with engine.dense():
            copied = deepcopy(engine.module)
            inner = deepcopy(engine.module.model)
        assert type(copied) is type(llama())
        assert_identical(copied.state_dict(), whole)
        assert inner.state_dict().keys() == llama().get_submodule("model").state_dict().keys()
        assert all(parameter.requires_grad for parameter in copied.parameters())
        loss_of(copied, batch).backward()
        torch.optim.SGD(copied.parameters(), lr=1.0).step()
        assert_identical(held_copies(engine), stays)
        assert_identical(dense_state(engine), whole)
        train(engine, num_steps=1, first=1)


def loaded_weights_are_taken_over(rank: Rank) -> None:
    """A state dict that is loaded inside of `dense()` is what training goes on from, whatever the plan; with
    `assign=True`, which puts other Parameters in place, an error says so."""
    choices: list[tuple[str, Any, dict[str, Any]]] = [
        *((regime, strategy, {"holders": 2}) for regime, strategy in (*CHOICES, ("forward", "block"))),
        ("forward", "block", {"holders": 3}),
    ]
    for number, (regime, strategy, block) in enumerate(choices):
        half = number % 2 == 1
        settings = config(regime=regime, strategy=strategy, **block) | ({"bf16": {"enabled": True}} if half else {})
        engine = engine_of(settings, llama())
        train(engine, num_steps=1)
        given = {name: value * 1.5 for name, value in dense_state(engine).items()}
        with engine.dense():
            engine.module.load_state_dict(given)
        assert not present_lacking(engine)
        assert_identical(dense_state(engine), given)
        train(engine, num_steps=1, first=1)
        refusal(RuntimeError, partial(assign, engine, given), "does not have the Parameters")


def assign(engine: Any, state: dict[str, torch.Tensor]) -> None:
    with engine.dense():
        engine.module.load_state_dict(state, assign=True)


def masters_follow_what_is_left(rank: Rank) -> None:
    """In bf16 a step starts from what was loaded last, though an error came after; never from scaled weights."""
    settings = config(holders=2, dense_branch_scale="coverage") | {"bf16": {"enabled": True}}
    states: dict[str, list[Any]] = {"nested": [], "loaded": []}
    for changes in (False, True):
        engine = engine_of(settings, llama())
        train(engine, num_steps=2)
        with engine.dense():
            if changes:
                engine.save_pretrained(rank.folder / "nested")  # a view inside of the view
        train(engine, num_steps=1, first=2)
        states["nested"].append(dense_state(engine))
        given = {name: value / 2 for name, value in dense_state(engine).items()}
        with suppress(ZeroDivisionError), engine.dense():
            engine.module.load_state_dict(given)
            _ = 1 / (not changes)
        train(engine, num_steps=1, first=3)
        states["loaded"].append(dense_state(engine))
    for one, other in states.values():
        assert_identical(one, other)


def replaced_outside_is_noticed(rank: Rank) -> None:
    """By the next step, and before a checkpoint is written: both would go on with the first one."""
    for regime, strategy, holders in (("forward", "block", 3), ("forward", "neuron", 2), ("backward", "block", 2)):
        engine = engine_of(config(holders=holders, regime=regime, strategy=strategy), llama())
        head = engine.module.lm_head
        first, head.weight = head.weight, torch.nn.Parameter(head.weight.detach().clone())
        words = ("'lm_head.weight'", "nobody would train")
        refusal(RuntimeError, partial(train, engine, num_steps=1), *words)
        refusal(RuntimeError, partial(engine.save_checkpoint, str(rank.folder)), *words)
        head.weight = first
        engine.optimizer.zero_grad()
        train(engine, num_steps=1)


CHECKS: list[Check] = [
    copies_are_independent,
    loaded_weights_are_taken_over,
    masters_follow_what_is_left,
    replaced_outside_is_noticed,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks)
def test_copies(outcome: str | None) -> None:
    assert outcome is None, outcome
