"""Copies of an engine's module, averages of weights, and Parameters that somebody replaced."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaForCausalLM

from tests.helpers.dense_views import CHOICES, assert_refused_in_use, batch_of, engine_with, held_copies, logits
from tests.helpers.live_tensors import present_lacking
from tests.helpers.models import config, llama, loss_of
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal, train

pytestmark = pytest.mark.slow

SIZE = 3


def copies_are_independent(rank: Rank) -> None:
    """Outside a copy is the subnetwork, also in evaluation; in a view it is the dense model, plain and trainable."""
    for number, (regime, strategy) in enumerate((*CHOICES, ("forward", "block"))):
        model = llama()
        engine = engine_with(model, regime=regime, strategy=strategy)
        train(engine, num_steps=1)
        whole, batch, stays = dense_state(engine), batch_of(rank), held_copies(engine)
        subnetwork = deepcopy(engine.module)
        if regime == "forward":
            assert torch.equal(loss_of(subnetwork, batch), loss_of(engine, batch))
        if (regime, strategy) != ("backward", "block"):
            assert_refused_in_use(subnetwork.state_dict(), "partial.* copy of a subnetwork: for a whole one copy")
        found = logits(subnetwork.eval(), batch)  # on its own: no rank waits for another
        if rank.rank == 0:
            assert torch.equal(logits(subnetwork, batch), found)
        with engine.dense(resident=number % 2 == 0):  # a copy makes it so
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


def averages_of_weights(rank: Rank) -> None:
    """A moving average of each rank's own part is, put together, the average of the dense model."""
    average: Any = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
    for number, (regime, strategy) in enumerate((*CHOICES, ("forward", "block"))):
        settings = config(holders=2, regime=regime, strategy=strategy)
        settings |= {"bf16": {"enabled": True}} if number % 2 else {}
        engine, undisturbed = engine_of(settings, llama()), engine_of(settings, llama())
        own = AveragedModel(engine.module, **average)
        with engine.dense(resident=True):
            dense = AveragedModel(engine.module, **average)
        for step in range(3):
            train(engine, num_steps=1, first=step)
            own.update_parameters(engine.module)
            with engine.dense(resident=True):
                dense.update_parameters(engine.module)
        trained, expected = dense_state(engine), dense.module.state_dict()
        assert not torch.equal(trained["lm_head.weight"], expected["lm_head.weight"])
        if regime == "backward" and strategy != "block":
            refusal(ValueError, partial(show, engine, own.module, rank), "held ones only")
        else:
            found, outputs = show(engine, own.module, rank)
            assert_identical(found, expected)
            assert torch.equal(outputs, logits(dense.module.eval(), batch_of(rank)))
            engine.train()
            engine.save_pretrained(rank.folder / f"trained{number}")
            with engine.dense(weights=own.module):
                engine.save_pretrained(rank.folder / f"average{number}")
                load = partial(engine.load_module_state_dict, {"module": {}})
                for call in (engine.step, partial(engine.save_checkpoint, str(rank.folder)), load):
                    refusal(RuntimeError, call, r"inside engine.dense(weights=...)")
            loaded = LlamaForCausalLM.from_pretrained(rank.folder / f"average{number}", dtype="auto")
            assert_identical(loaded.state_dict(), expected)
        assert_identical(dense_state(engine), trained)
        train(engine, num_steps=1, first=3)
        train(undisturbed, num_steps=4)
        assert_identical(dense_state(engine), dense_state(undisturbed))


def show(engine: Any, weights: Any, rank: Rank) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    engine.eval()
    with engine.dense(weights=weights):
        outputs = logits(engine, batch_of(rank))
    with engine.dense(weights=weights, resident=True):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}, outputs


def replaced_tensors_are_taken_over(rank: Rank) -> None:
    """`assign=True` puts other Parameters in place: their values are taken, and the first ones go on being trained."""
    choices: list[tuple[str, Any, dict[str, Any]]] = [
        *((regime, strategy, {"holders": 2}) for regime, strategy in (*CHOICES, ("forward", "block"))),
        ("forward", "block", {"holders": 3}),
        ("forward", "block", {"holders": 2, "dense_branch_scale": "coverage"}),
    ]
    for number, (regime, strategy, block) in enumerate(choices):
        half = number % 2 == 1
        settings = config(regime=regime, strategy=strategy, **block) | ({"bf16": {"enabled": True}} if half else {})
        states = []
        for assign in (False, True):
            engine = engine_of(settings, llama())
            train(engine, num_steps=1)
            given = {name: value * 1.5 for name, value in dense_state(engine).items()}
            objects = dict(engine.module.named_parameters())
            with engine.dense():  # a state dict makes it resident
                engine.module.state_dict()
                engine.module.load_state_dict(given, assign=assign)
            assert all(objects[name] is parameter for name, parameter in engine.module.named_parameters())
            assert not present_lacking(engine)
            found = dense_state(engine)
            for name, value in given.items():
                torch.testing.assert_close(found[name], value, rtol=1e-2 if half else 1e-6, atol=0)
            train(engine, num_steps=2, first=1)
            states.append(dense_state(engine))
        assert_identical(*states)


def masters_follow_what_is_left(rank: Rank) -> None:
    """In bf16 a step starts from what was loaded last, though an error came after; never from scaled weights."""
    settings = config(holders=2, dense_branch_scale="coverage") | {"bf16": {"enabled": True}}
    states: dict[str, list[Any]] = {"nested": [], "loaded": []}
    for changes in (False, True):
        engine = engine_of(settings, llama())
        train(engine, num_steps=2)
        with engine.dense(resident=True):
            if changes:
                engine.save_pretrained(rank.folder / "nested")  # a view inside of the view
        train(engine, num_steps=1, first=2)
        states["nested"].append(dense_state(engine))
        given = {name: value / 2 for name, value in dense_state(engine).items()}
        with suppress(ZeroDivisionError), engine.dense(resident=True):
            engine.module.load_state_dict(given)
            _ = 1 / (not changes)
        train(engine, num_steps=1, first=3)
        states["loaded"].append(dense_state(engine))
    for one, other in states.values():
        assert_identical(one, other)


def replaced_by_another_shape(rank: Rank) -> None:
    """On one rank, which all hear of where they leave together; nothing is lost."""
    engine = engine_of(config(holders=2), llama())
    before = dense_state(engine)

    def replace() -> None:
        with engine.dense(resident=True):
            if rank.rank == 1:
                engine.module.lm_head.weight = torch.nn.Parameter(torch.ones(2, 3))

    refusal(RuntimeError, replace, "'lm_head.weight' ((2, 3) on cpu", "[on rank 1]")
    assert_identical(dense_state(engine), before)
    train(engine, num_steps=1)


def replaced_outside_is_noticed(rank: Rank) -> None:
    """By the next step, and before a checkpoint is written: both would go on with the first one."""
    for regime, strategy, holders in (("forward", "block", 3), ("forward", "neuron", 2), ("backward", "block", 2)):
        engine = engine_of(config(holders=holders, regime=regime, strategy=strategy), llama())
        head = engine.module.lm_head
        first, head.weight = head.weight, torch.nn.Parameter(head.weight.detach().clone())
        words = ("'lm_head.weight'", "nobody would train", "before deepspeed.initialize")
        refusal(RuntimeError, partial(train, engine, num_steps=1), *words)
        refusal(RuntimeError, partial(engine.save_checkpoint, str(rank.folder)), *words)
        head.weight = first
        engine.optimizer.zero_grad()
        train(engine, num_steps=1)


CHECKS: list[Check] = [
    copies_are_independent,
    averages_of_weights,
    replaced_tensors_are_taken_over,
    masters_follow_what_is_left,
    replaced_by_another_shape,
    replaced_outside_is_noticed,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks)
def test_copies(outcome: str | None) -> None:
    assert outcome is None, outcome
