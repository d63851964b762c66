"""The dense model in evaluation and in `engine.dense()`, whatever ranks run of it; state dicts, copies and export."""

from __future__ import annotations

import itertools
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sdp_deepspeed.config import MODES
from tests.helpers.dense_views import (
    assert_refused_in_use,
    batch_of,
    engine_with,
    held_copies,
    logits,
    whole_copy,
)
from tests.helpers.live_tensors import present_lacking
from tests.helpers.models import MIXED, config, family, llama, loss_of
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal, train

SIZE = 3


def is_the_dense_model(rank: Rank) -> None:
    """Before and after training: the same bits as the model, in evaluation and in `engine.dense()`, and back."""
    choices: list[tuple[str, Any, str]] = [(*mode, "gpt2") for mode in MODES]
    choices += [("forward", MIXED, "qwen3"), ("backward", MIXED, "gpt_neox_parallel")]
    for regime, strategy, name in choices:
        model = family(name, num_layers=3)
        dense, batch = deepcopy(model).eval(), batch_of(rank)
        engine = engine_with(model, regime=regime, strategy=strategy)
        assert_identical(dense_state(engine), dense.state_dict())
        train(engine, num_steps=2)
        whole = whole_copy(engine, dense)
        expected, before = logits(whole, batch), held_copies(engine)
        engine.eval()
        assert torch.equal(logits(engine, batch), expected), (name, regime, strategy)
        with engine.dense():
            assert torch.equal(logits(engine, batch), expected)
            assert torch.equal(logits(engine.module, batch), expected)
            assert_identical(engine.module.state_dict(), whole.state_dict())
        engine.train()
        assert not present_lacking(engine)
        assert_identical(held_copies(engine), before)
        train(engine, num_steps=1, first=2)


def holders_may_be_few(rank: Rank) -> None:
    """One holder serves two others; with all holders there is nothing to fetch."""
    for holders in (1, 3):
        model = llama(3)
        dense, batch = deepcopy(model).eval(), batch_of(rank)
        engine = engine_with(model, holders=holders)
        engine.eval()
        assert torch.equal(logits(engine, batch), logits(dense, batch))
        with engine.dense():
            assert_identical(engine.module.state_dict(), dense.state_dict())
        engine.train()
        assert not present_lacking(engine)


def evaluation_leaves_training_alone(rank: Rank) -> None:
    """A worker's own loss is the same before and after, and is not the dense model's."""
    engine, batch = engine_with(llama()), batch_of(rank)
    before = loss_of(engine, batch).item()
    engine.eval()
    with torch.inference_mode():
        dense = loss_of(engine, batch).item()
    with torch.no_grad():
        assert loss_of(engine.module, batch).item() == dense, "the bare module in evaluation is the dense model too"
    engine.train()
    assert loss_of(engine, batch).item() == before
    assert dense != before
    with torch.no_grad():
        assert loss_of(engine, batch).item() == before, (
            "in training mode it is the subnetwork, with or without gradients"
        )
    engine.eval()
    assert loss_of(engine, batch).item() == before, "with gradients it is the subnetwork"
    engine.train()
    assert len(set(train(engine, num_steps=2))) == 2


def state_dict_is_whole_or_refused(rank: Rank) -> None:
    engine, dense = engine_with(llama()), llama()
    with engine.dense():
        assert_identical(engine.module.state_dict(), dense.state_dict())
    missing = [unit for index, unit in enumerate(engine.plan.units) if not engine.plan.holds_rank(index, rank.rank)]
    modules = {piece.parameter.rpartition(".")[0] for unit in missing for piece in unit.pieces}
    parents = {parent for name in modules for parent in itertools.accumulate(name.split("."), "{}.{}".format)}
    for name in sorted(parents | {""}):
        state = engine.module.get_submodule(name).state_dict()
        assert_refused_in_use(state, r"does not hold .*partial.*engine\.dense\(\)")
    assert_identical(  # shared: whole everywhere
        engine.module.model.embed_tokens.state_dict(), dense.get_submodule("model.embed_tokens").state_dict()
    )


def state_dicts_of_narrow_modules_are_refused(rank: Rank) -> None:
    engine, dense = engine_with(llama(), strategy="neuron"), llama().eval()
    inner = engine.module.model.layers[0].mlp
    for module in (engine.module, inner, inner.up_proj):
        assert_refused_in_use(module.state_dict(), r"does not hold .*partial.*engine\.dense\(\)")
    engine.module.model.layers[0].input_layernorm.state_dict()  # shared: whole everywhere
    with engine.dense():
        assert_identical(inner.state_dict(), dense.get_submodule("model.layers.0.mlp").state_dict())


def ranks_run_what_they_like(rank: Rank) -> None:
    """In an evaluation ranks run other numbers of batches, another part first, or one part more often; one of them
    fails in between. With a loss of the subnetwork kept alive, whose graph knows other shapes."""
    batch = batch_of(rank)
    for strategy in ("block", "neuron"):
        engine, dense = engine_with(llama(), strategy=strategy), llama().eval()
        inner: Any = dense.get_submodule("model")
        expected = inner(batch).last_hidden_state
        kept = loss_of(engine, batch)
        for evaluating in (engine, engine.module):
            evaluating.eval()
            if rank.rank == 1:
                with torch.no_grad():
                    assert torch.equal(engine.module.model(batch).last_hidden_state, expected)
            for _ in range(1 + rank.rank):
                assert torch.equal(logits(engine, batch), logits(dense, batch))
            if rank.rank == 2:
                layer = engine.module.model.layers[1].mlp.down_proj
                hook = layer.register_forward_pre_hook(mock.Mock(side_effect=KeyError("mine")))
                with pytest.raises(KeyError, match="mine"):
                    logits(engine, batch)
                hook.remove()
            evaluating.train()
            losses = [loss_of(engine, batch) for _ in range(2)]
            assert not present_lacking(engine)
            engine.backward(losses[0])
        engine.step()
        assert kept.isfinite()
        train(engine, num_steps=1)


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


def backward_in_the_dense_view_is_refused(rank: Rank) -> None:
    """It would add gradients of the dense model to those of the subnetwork."""
    for regime, strategy in MODES:
        engine = engine_with(llama(), regime=regime, strategy=strategy)
        with engine.dense():
            loss = loss_of(engine.module, batch_of(rank))
            with pytest.raises(RuntimeError, match=r"backward inside engine\.dense\(\)"):
                engine.backward(loss)
            with pytest.raises(RuntimeError, match=r"inside engine\.dense\(\).*torch\.autograd\.grad"):
                loss.backward()
        engine.optimizer.zero_grad()
        train(engine, num_steps=1)


def training_goes_on_where_it_was(rank: Rank) -> None:
    """An evaluation between two micro-steps leaves the gradients of the first alone."""
    for regime, strategy in MODES:
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


def copies_are_independent(rank: Rank) -> None:
    """Outside a copy is the subnetwork, also in evaluation; in a view it is the dense model, plain and trainable."""
    for regime, strategy in MODES:
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


def replaced_parameters_are_noticed(rank: Rank) -> None:
    """By the next step, before a checkpoint is written, and when a state dict is loaded with `assign=True`: all would
    go on with the first ones."""
    for regime, strategy, holders in (("forward", "block", 3), ("forward", "neuron", 2), ("backward", "block", 2)):
        engine = engine_of(config(holders=holders, regime=regime, strategy=strategy), llama())
        head = engine.module.lm_head
        first, head.weight = head.weight, nn.Parameter(head.weight.detach().clone())
        words = ("'lm_head.weight'", "Parameters were replaced")
        refusal(RuntimeError, partial(train, engine, num_steps=1), *words)
        refusal(RuntimeError, partial(engine.save_checkpoint, str(rank.folder)), *words)
        head.weight = first
        engine.optimizer.zero_grad()
        train(engine, num_steps=1)
        refusal(RuntimeError, partial(assign, engine), "Parameters were replaced")


def assign(engine: Any) -> None:
    with engine.dense():
        engine.module.load_state_dict(llama().state_dict(), assign=True)


def saves_pretrained(rank: Rank) -> None:
    from transformers import AutoModelForCausalLM

    engine = engine_with(llama())
    train(engine, num_steps=1)
    expected = whole_copy(engine, llama())
    engine.save_pretrained(rank.folder / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(rank.folder / "hf")
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert_identical(loaded.state_dict(), expected.state_dict())
    batch = batch_of(rank)
    known = logits(loaded.eval(), batch)
    assert torch.equal(known, logits(expected, batch))
    assert not present_lacking(engine)
    Path(rank.folder / "file").touch()
    refusal((RuntimeError, OSError), lambda: engine.save_pretrained(rank.folder / "file" / "x"), "file")
    refusal(RuntimeError, lambda: engine.save_pretrained(rank.folder / "hf", tokenizer=object()), "save_pretrained")
    with mock.patch("torch.save", side_effect=OSError(28, "No space left on device")):
        refusal(OSError, lambda: engine.save_16bit_model(str(rank.folder / "y")), "No space", "[on rank 0]")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(rank.folder / "hf").eval(), batch), known)
    engine.save_16bit_model(str(rank.folder / "y"))
    assert [path.name for path in (rank.folder / "y").iterdir()] == ["pytorch_model.bin"]
    assert not present_lacking(engine)
    train(engine, num_steps=1)


@pytest.mark.slow
def one_rank_alone_ends_with_an_error(rank: Rank) -> None:
    """The others go on with training."""
    engine = engine_with(llama())
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match="all ranks must call it"), engine.dense():
            pass
    else:
        for _ in range(2):
            engine._meetings.passing()
    gathered(None)


CHECKS: list[Check] = [
    is_the_dense_model,
    holders_may_be_few,
    evaluation_leaves_training_alone,
    state_dict_is_whole_or_refused,
    state_dicts_of_narrow_modules_are_refused,
    ranks_run_what_they_like,
    backward_needs_no_partner,
    backward_in_the_dense_view_is_refused,
    training_goes_on_where_it_was,
    copies_are_independent,
    replaced_parameters_are_noticed,
    saves_pretrained,
    one_rank_alone_ends_with_an_error,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks, slow=["3-backward_needs*", "3-copies*", "3-state_dicts_of*"])
def test_dense(outcome: str | None) -> None:
    assert outcome is None, outcome
