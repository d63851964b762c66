"""The dense view where units are frozen (backward regime), neurons or heads, or both."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.dense_views import (
    CHOICES,
    assert_refused_in_use,
    batch_of,
    engine_with,
    held_copies,
    logits,
    whole_copy,
)
from tests.helpers.live_tensors import present_lacking
from tests.helpers.models import SPECIMENS, family, llama, loss_of
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, train

SIZE = 3


def is_the_dense_model(rank: Rank) -> None:
    """Put together from parts to the same bits, and back."""
    for (regime, strategy), name in itertools.product(CHOICES, ("qwen3", "gpt2", "gpt_neox_parallel")):
        model = family(name)
        dense, batch = deepcopy(model).eval(), batch_of(rank)
        engine = engine_with(model, regime=regime, strategy=strategy)
        train(engine, num_steps=1)
        whole = whole_copy(engine, dense)
        expected, before = logits(whole, batch), held_copies(engine)
        engine.eval()
        assert torch.equal(logits(engine, batch), expected), (name, regime, strategy)
        with engine.dense():
            assert torch.equal(logits(engine.module, batch), expected)
            assert_identical(engine.module.state_dict(), whole.state_dict())
            with pytest.raises(RuntimeError, match=r"backward inside engine\.dense\(\)"):
                engine.backward(loss_of(engine.module, batch))
        engine.train()
        assert not present_lacking(engine)
        assert_identical(held_copies(engine), before)
        train(engine, num_steps=1, first=1)


def training_goes_on_where_it_was(rank: Rank) -> None:
    """An evaluation between two micro-steps leaves the gradients of the first alone."""
    for regime, strategy in CHOICES:
        states = []
        for evaluates in (False, True):
            engine = engine_with(llama(), regime=regime, strategy=strategy)
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(loss_of(engine, batch_of(rank)))
            if evaluates:
                engine.eval()
                logits(engine, batch_of(rank))
                engine.train()
                dense_state(engine)
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(loss_of(engine, batch_of(rank).flip(1)))
            engine.step()
            states.append(dense_state(engine))
        assert_identical(*states)


def backward_needs_no_partner(rank: Rank) -> None:
    """Every rank has the whole model: it may evaluate as much as it likes, in its own order, and inner modules too."""
    for strategy in ("block", "neuron"):
        engine, dense = engine_with(llama(), regime="backward", strategy=strategy), llama().eval()
        inner: Any = dense.get_submodule("model")
        expected = inner(batch_of(rank)).last_hidden_state
        engine.eval()
        for _ in range(rank.rank):
            assert torch.equal(logits(engine, batch_of(rank)), logits(dense, batch_of(rank)))
        if rank.rank == 1:
            with torch.no_grad():
                assert torch.equal(engine.module.model(batch_of(rank)).last_hidden_state, expected)
            with engine.dense():
                assert_identical(engine.module.state_dict(), dense.state_dict())
        engine.train()
        train(engine, num_steps=1)


def state_dicts_of_narrow_modules_are_refused(rank: Rank) -> None:
    engine, dense = engine_with(llama(), strategy="neuron"), llama().eval()
    inner = engine.module.model.layers[0].mlp
    for module in (engine.module, inner, inner.up_proj):
        assert_refused_in_use(module.state_dict(), r"does not hold .*partial.*engine\.dense\(\)")
    engine.module.model.layers[0].input_layernorm.state_dict()  # shared: whole everywhere
    with engine.dense():
        assert_identical(inner.state_dict(), dense.get_submodule("model.layers.0.mlp").state_dict())


def generates(rank: Rank) -> None:
    """With a key/value cache, which training has no use for."""
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for regime, name in itertools.product(("forward", "backward"), ("llama", "gpt2", "gpt_neox")):
        dense: Any = family(name).eval()
        engine = engine_with(family(name), regime=regime, strategy="neuron")
        engine.eval()
        with engine.dense():
            found = engine.module.generate(batch_of(rank), **options)
        assert torch.equal(found, dense.generate(batch_of(rank), **options)), (regime, name)


def a_failing_forward_goes_back(rank: Rank) -> None:
    """An error from within a branch, and inner modules called alone with a wrong shape: training goes on as if nothing
    had been."""
    for regime in ("forward", "backward"):
        states = []
        for fails in (False, True):
            engine, batch = engine_with(llama(), regime=regime, strategy="neuron"), batch_of(rank)
            shapes = {name: p.shape for name, p in engine.module.named_parameters()}
            engine.eval()
            if fails:
                inside = engine.module.model.layers[1].mlp.down_proj
                hook = inside.register_forward_pre_hook(mock.Mock(side_effect=KeyError("mine")))
                with pytest.raises(KeyError, match="mine"):
                    logits(engine, batch)
                hook.remove()
                with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    engine.module.model.layers[0].mlp(torch.ones(1, 2, 3))
            assert torch.equal(logits(engine, batch), logits(llama().eval(), batch))
            engine.train()
            assert {name: p.shape for name, p in engine.module.named_parameters()} == shapes
            assert not present_lacking(engine)
            train(engine, num_steps=1)
            states.append(dense_state(engine))
        assert_identical(*states)


def generates_in_training_mode(rank: Rank) -> None:
    """Backward regime: a sample between two steps, without going to evaluation; ranks need not do the same."""
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for name in ("llama", "gpt2", "gpt_neox"):
        dense: Any = SPECIMENS[name].build()
        engine = engine_with(SPECIMENS[name].build(), holders=1, regime="backward", strategy="neuron")
        prompt, number = batch_of(rank), 4 + rank.rank
        found = engine.module.generate(prompt, max_new_tokens=number, **options)
        assert torch.equal(found, dense.generate(prompt, max_new_tokens=number, **options)), name
        assert engine.module.training
        train(engine, num_steps=1)


def its_own_backward_is_refused(rank: Rank) -> None:
    """`loss.backward()` would add gradients of the dense model to those of the subnetwork."""
    for regime, strategy in CHOICES:
        engine = engine_with(llama(), regime=regime, strategy=strategy)
        with engine.dense():
            loss = loss_of(engine.module, batch_of(rank))
            with pytest.raises(RuntimeError, match=r"inside engine\.dense\(\).*torch\.autograd\.grad"):
                loss.backward()
        engine.optimizer.zero_grad()
        train(engine, num_steps=1)


CHECKS: list[Check] = [
    is_the_dense_model,
    training_goes_on_where_it_was,
    backward_needs_no_partner,
    state_dicts_of_narrow_modules_are_refused,
    generates,
    a_failing_forward_goes_back,
    generates_in_training_mode,
    its_own_backward_is_refused,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.slow  # repeats test_dense_view in each mode
@pytest.mark.checks(SIZE, _checks)
def test_dense_view_in_all_modes(outcome: str | None) -> None:
    assert outcome is None, outcome
