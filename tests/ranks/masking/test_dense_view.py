"""The dense model in evaluation and in `engine.dense()`, whatever ranks run of it; state dicts and export."""

from __future__ import annotations

import itertools
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.dense_views import assert_refused_in_use, batch_of, engine_with, logits, whole_copy
from tests.helpers.live_tensors import present_lacking
from tests.helpers.models import FAMILIES, family, llama, loss_of
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, gathered, refusal, train

SIZE = 3


def is_the_dense_model(rank: Rank) -> None:
    """Every family, before and after training: the same bits as the model, in evaluation and in `engine.dense()`."""
    for name, granularity in itertools.product(FAMILIES, ("sublayer", "layer")):
        model = family(name, num_layers=3)
        dense, batch = deepcopy(model).eval(), batch_of(rank)
        engine = engine_with(model, granularity=granularity)
        assert_identical(dict(dense.named_parameters()), dict(whole_copy(engine, dense).named_parameters()))
        train(engine, num_steps=2)
        expected = logits(whole_copy(engine, dense), batch)
        engine.eval()
        assert torch.equal(logits(engine, batch), expected), (name, granularity)
        with engine.dense():
            assert torch.equal(logits(engine, batch), expected)
            assert torch.equal(logits(engine.module, batch), expected)
        engine.train()
        assert not present_lacking(engine)


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


def generates(rank: Rank) -> None:
    engine, dense = engine_with(llama()), llama().eval()
    prompt: Any = batch_of(rank)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    engine.eval()
    with engine.dense():
        found = engine.module.generate(prompt[: rank.rank + 1], **options)  # ranks need not do the same inside
    expected: Any = dense
    assert torch.equal(found, expected.generate(prompt[: rank.rank + 1], **options))


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
    ranks_run_what_they_like,
    generates,
    saves_pretrained,
    one_rank_alone_ends_with_an_error,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks)
def test_dense(outcome: str | None) -> None:
    assert outcome is None, outcome
