"""The dense view where units are frozen (backward regime), neurons or heads, or both."""

from __future__ import annotations

import itertools
from copy import deepcopy
from functools import partial
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
from tests.helpers.training import assert_identical, dense_state, refusal, train

SIZE = 3


def is_the_dense_model(rank: Rank) -> None:
    """Streamed, resident and automatic: put together from parts to the same bits, and back."""
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
            assert torch.equal(logits(engine, batch), expected)
            assert_identical(engine.module.state_dict(), whole.state_dict())
        with engine.dense(resident=True):
            assert torch.equal(logits(engine.module, batch), expected)
            if (regime, strategy) != ("backward", "block"):  # whose module is the dense model at all times
                with pytest.raises(RuntimeError, match=r"backward inside engine\.dense\(resident=True\)"):
                    engine.backward(loss_of(engine.module, batch))
        assert not present_lacking(engine)
        assert_identical(held_copies(engine), before)
        engine.train()
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
                found = engine.module.model(batch_of(rank)).last_hidden_state
                torch.testing.assert_close(found, expected)  # held and lacking parts are added in another order
                with engine.dense(resident=True):
                    assert torch.equal(engine.module.model(batch_of(rank)).last_hidden_state, expected)
            with engine.dense():
                assert_identical(engine.module.state_dict(), dense.state_dict())
        engine.train()
        train(engine, num_steps=1)


def narrow_modules_are_dense_or_refused(rank: Rank) -> None:
    """Forward regime: neither an inner module's output nor a state dict is a part without a word."""
    engine, dense = engine_with(llama(), strategy="neuron"), llama().eval()
    engine.eval()
    inner = engine.module.model.layers[0].mlp
    with torch.no_grad():
        refusal(
            RuntimeError, lambda: engine.module.model(batch_of(rank)), "layers.0.attention", "incomplete without a word"
        )
    for module in (engine.module, inner, inner.up_proj):
        assert_refused_in_use(module.state_dict(), r"does not hold .*partial.*engine\.dense\(resident=True\)")
    engine.module.model.layers[0].input_layernorm.state_dict()  # shared: whole everywhere
    with engine.dense(resident=True):
        assert_identical(inner.state_dict(), dense.get_submodule("model.layers.0.mlp").state_dict())


def generates(rank: Rank) -> None:
    """With a key/value cache, which training has no use for."""
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for regime, name in itertools.product(("forward", "backward"), ("llama", "gpt2", "gpt_neox")):
        dense: Any = family(name).eval()
        engine = engine_with(family(name), regime=regime, strategy="neuron")
        engine.eval()
        with engine.dense(resident=True):
            found = engine.module.generate(batch_of(rank), **options)
        assert torch.equal(found, dense.generate(batch_of(rank), **options)), (regime, name)


def uneven_batches_end_with_an_error(rank: Rank) -> None:
    engine, batch = engine_with(llama(), strategy="neuron"), batch_of(rank)
    engine.eval()
    logits(engine, batch)
    uneven = engine.train if rank.rank == 1 else lambda: logits(engine, batch)
    refusal(RuntimeError, uneven, "rank 1 ended its evaluation", "rank 0, 2 began a forward pass")
    engine.train()
    assert not present_lacking(engine)
    train(engine, num_steps=1)


def a_failing_forward_goes_back(rank: Rank) -> None:
    """The error comes from within a branch that was just put together; all of it is narrow again, and trains."""
    for regime in ("forward", "backward"):
        engine, batch = engine_with(llama(), regime=regime, strategy="neuron"), batch_of(rank)
        shapes = {name: p.shape for name, p in engine.module.named_parameters()}
        inside = engine.module.model.layers[1].mlp.down_proj
        hook = inside.register_forward_pre_hook(mock.Mock(side_effect=KeyError("mine")))
        engine.eval()
        with pytest.raises(KeyError, match="mine"):
            logits(engine, batch)
        assert {name: p.shape for name, p in engine.module.named_parameters()} == shapes
        hook.remove()
        assert torch.equal(logits(engine, batch), logits(llama().eval(), batch))
        engine.train()
        train(engine, num_steps=1)


def a_failing_inner_module_goes_back(rank: Rank) -> None:
    """Called alone with a wrong shape; held weights get their gradients in the next step as if nothing had been."""
    states = []
    for fails in (False, True):
        engine = engine_with(llama(), regime="backward", strategy="neuron")
        first, second = engine.module.model.layers
        if fails:
            engine.eval()
            wrong = torch.ones(1, 2, 3)
            for inner, rest in ((first.mlp, ()), (second.self_attn, ((wrong, wrong), None))):
                with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    inner(wrong, *rest)
            assert not any(part.filled for part in engine._applied.mask.parts)
            assert not present_lacking(engine)
            engine.train()
        engine.backward(loss_of(engine, batch_of(rank)))
        assert all(layer.mlp.up_proj.weight.grad is not None for layer in (first, second))
        assert all(layer.self_attn.q_proj.weight.grad is not None for layer in (first, second))
        engine.step()
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
        engine.eval()  # with gradients enabled the body runs in two parts
        cache = engine(prompt).past_key_values
        assert cache.get_seq_length() == 0
        again = partial(engine, prompt, past_key_values=cache)
        refusal(RuntimeError, again, "0.attention runs in two parts", "generate without gradients")
        engine.train()
        train(engine, num_steps=1)


def its_own_backward_leaves_what_is_cut_alone(rank: Rank) -> None:
    """Between two micro-steps a backward pass through the resident dense model adds nothing to the gradients of narrow
    parameters, and what this rank lacks gets none, which would be averaged."""
    for regime, strategy in CHOICES:
        model, reached = llama(), llama()
        kept = loss_of(model, batch_of(rank))  # from before: its graph knows the dense shapes
        engine = engine_with(model, regime=regime, strategy=strategy)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(loss_of(engine, batch_of(rank)))
        own = gradients_of(engine)
        with engine.dense(resident=True):
            loss_of(engine.module, batch_of(rank).flip(1)).backward()
        found = gradients_of(engine)
        assert found.keys() == own.keys()
        loss_of(reached, batch_of(rank).flip(1)).backward()
        assert all(p.grad is not None and p.grad.any() for p in reached.parameters()), "it would have been seen"
        units = enumerate(engine.plan.units)
        pieces = [(piece, engine.plan.holds_rank(index, rank.rank)) for index, unit in units for piece in unit.pieces]
        assert found.keys().isdisjoint(piece.parameter for piece, held in pieces if not held and piece.dim is None)
        cut = {piece.parameter for piece, _ in pieces if piece.dim is not None}
        assert bool(cut) == (strategy != "block")
        assert_identical({name: found[name] for name in cut}, {name: own[name] for name in cut})
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(loss_of(engine, batch_of(rank)))
        engine.step()
        assert kept.isfinite()


def gradients_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}


CHECKS: list[Check] = [
    is_the_dense_model,
    training_goes_on_where_it_was,
    backward_needs_no_partner,
    narrow_modules_are_dense_or_refused,
    generates,
    uneven_batches_end_with_an_error,
    a_failing_forward_goes_back,
    a_failing_inner_module_goes_back,
    generates_in_training_mode,
    its_own_backward_leaves_what_is_cut_alone,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.slow  # repeats test_dense_view in each mode
@pytest.mark.checks(SIZE, _checks)
def test_dense_view_in_all_modes(outcome: str | None) -> None:
    assert outcome is None, outcome
