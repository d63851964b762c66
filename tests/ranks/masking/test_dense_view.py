"""The dense view: streamed, resident and on its own in evaluation; uneven use is an error on all ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from functools import partial
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
    """Every family, before and after training: streamed, resident and automatic give the same bits as the model."""
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
        with engine.dense(resident=True):
            assert torch.equal(logits(engine, batch), expected)
            assert torch.equal(logits(engine.module, batch), expected)
        assert not present_lacking(engine)


def holders_may_be_few(rank: Rank) -> None:
    """One holder serves two others in rounds; with all holders there is nothing to fetch."""
    for holders in (1, 3):
        model = llama(3)
        dense, batch = deepcopy(model).eval(), batch_of(rank)
        engine = engine_with(model, holders=holders)
        engine.eval()
        assert torch.equal(logits(engine, batch), logits(dense, batch))
        with engine.dense():
            assert_identical(engine.module.state_dict(), dense.state_dict())
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


def streaming_cannot_be_differentiated(rank: Rank) -> None:
    engine = engine_with(llama())
    with engine.dense():
        refusal(RuntimeError, lambda: engine(batch_of(rank)), "nothing to differentiate", "resident=True")
        engine.eval()
        logits(engine, batch_of(rank))


def state_dict_is_whole_or_refused(rank: Rank) -> None:
    engine, dense = engine_with(llama()), llama()
    for resident in (False, True):
        with engine.dense(resident=resident):
            assert_identical(engine.module.state_dict(), dense.state_dict())
    missing = [unit for index, unit in enumerate(engine.plan.units) if not engine.plan.holds_rank(index, rank.rank)]
    modules = {piece.parameter.rpartition(".")[0] for unit in missing for piece in unit.pieces}
    parents = {parent for name in modules for parent in itertools.accumulate(name.split("."), "{}.{}".format)}
    for name in sorted(parents | {""}):
        state = engine.module.get_submodule(name).state_dict()
        assert_refused_in_use(state, r"does not hold .*partial.*engine\.dense\(resident=True\)")
    assert_identical(  # shared: whole everywhere
        engine.module.model.embed_tokens.state_dict(), dense.get_submodule("model.embed_tokens").state_dict()
    )


def evaluation_with_gradients_may_switch_them_off_inside(rank: Rank) -> None:
    """As reentrant checkpointing does in a forward pass of the subnetwork."""
    engine = engine_with(llama())
    engine.eval()
    expected = engine(batch_of(rank)).logits
    layer = engine.module.model.layers[0]
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: torch.no_grad()(plain)(*args, **kwargs)
    assert torch.equal(engine(batch_of(rank)).logits, expected)


def inner_modules_are_dense_or_refused(rank: Rank) -> None:
    """Below the model's own forward nobody streams, so an inner call would be the subnetwork's in silence."""
    engine, dense = engine_with(llama()), llama().eval()
    engine.eval()
    with torch.no_grad():
        refusal(RuntimeError, lambda: engine.module.model(batch_of(rank)), "incomplete without a word", "resident=True")
        with engine.dense(resident=True):
            found = engine.module.model(batch_of(rank)).last_hidden_state
        assert torch.equal(found, dense.get_submodule("model")(batch_of(rank)).last_hidden_state)


def generates(rank: Rank) -> None:
    engine, dense = engine_with(llama()), llama().eval()
    prompt: Any = batch_of(rank)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    engine.eval()
    with engine.dense(resident=True):
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
    refusal(
        RuntimeError, lambda: engine.save_pretrained(rank.folder / "file"), "save_pretrained", "cannot write", "file"
    )
    for name in ("x", "hf"):  # what begins well and then fails leaves nothing new
        refusal(
            RuntimeError, lambda name=name: engine.save_pretrained(rank.folder / name, tokenizer=object()), "cannot"
        )
    with mock.patch("torch.save", side_effect=OSError(28, "No space left on device")):
        refusal(RuntimeError, lambda: engine.save_16bit_model(str(rank.folder / "y")), "save_16bit_model", "No space")
    assert sorted(path.name for path in rank.folder.iterdir()) == ["file", "hf"]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(rank.folder / "hf").eval(), batch), known)
    engine.save_16bit_model(str(rank.folder / "y"))
    assert [path.name for path in (rank.folder / "y").iterdir()] == ["pytorch_model.bin"]
    assert not present_lacking(engine)


def uneven_batches_end_with_an_error(rank: Rank) -> None:
    """Rank 1 has one batch fewer; whatever it does instead, all ranks hear of it, and can go on afterward."""
    batch = batch_of(rank)

    def evaluate(engine: Any, instead: Callable[[], Any]) -> None:
        engine.eval()
        for _ in range(2):
            logits(engine, batch)
        _ = instead() if rank.rank == 1 else logits(engine, batch)

    def resident(engine: Any) -> None:
        with engine.dense(resident=True):
            pass

    def train_forward(engine: Any) -> None:
        engine.module.train()  # not through the engine, which would notice by itself
        loss_of(engine, batch)

    instead: dict[str, tuple[Callable[[Any], Any], str]] = {
        "engine.train": (lambda engine: engine.train(), "ended its evaluation"),
        "training forward": (train_forward, "ended its evaluation"),
        "state dict": (resident, "ended its evaluation"),
    }
    for name, (act, words) in instead.items():
        engine = engine_with(llama())
        uneven = partial(evaluate, engine, partial(act, engine))
        said = refusal(RuntimeError, uneven, f"rank 1 {words}", "rank 0, 2 began a forward pass")
        assert "after 2 evaluation batches" in said, name
        assert "the same number of batches" in said, name
        engine.eval()
        assert torch.equal(logits(engine, batch), logits(llama().eval(), batch)), f"no evaluation after {name}"
        engine.train()
        train(engine, num_steps=1)


def leaving_early_is_an_error(rank: Rank) -> None:
    engine = engine_with(llama())
    engine.eval()

    def uneven() -> None:
        with engine.dense():
            for _ in range(1 if rank.rank == 1 else 2):
                logits(engine, batch_of(rank))

    refusal(RuntimeError, uneven, "rank 1 ended its evaluation", "rank 0, 2 began a forward pass")
    assert not present_lacking(engine)
    engine.train()
    train(engine, num_steps=1)


def a_failing_forward_returns_memory(rank: Rank) -> None:
    """The error comes from within a unit, which some ranks have fetched just before."""
    engine, batch = engine_with(llama()), batch_of(rank)
    engine.eval()
    inside = engine.module.model.layers[1].mlp.down_proj
    hook = inside.register_forward_pre_hook(mock.Mock(side_effect=KeyError("mine")))

    def resident() -> None:
        with engine.dense(resident=True):
            logits(engine, batch)

    for fail in (lambda: logits(engine, batch), resident):
        with pytest.raises(KeyError, match="mine"):
            fail()
        assert not present_lacking(engine)
    hook.remove()
    assert torch.equal(logits(engine, batch), logits(llama().eval(), batch))
    engine.train()


@pytest.mark.slow
def a_rank_that_never_comes_is_named(rank: Rank) -> None:
    """Last, because the barrier's group is broken afterward; `refusal` cannot be used, since rank 1 sees no error."""
    with mock.patch("sdp_deepspeed.distributed.monitored_barrier.TIMEOUT", timedelta(seconds=2)):
        engine = engine_with(llama())
    engine.eval()
    said, began = "", time.monotonic()
    if rank.rank != 1:
        with pytest.raises(RuntimeError) as caught:
            logits(engine, batch_of(rank))
        said = str(caught.value)
    assert time.monotonic() - began < 30
    texts = gathered(said)
    for other in (0, 2):
        assert f"rank {other} began a forward pass" in texts[other]
        assert "waited for" in texts[other]
        assert "did not come" in texts[other]
        assert "To generate, " in texts[other]  # rank 0 alone does it in many scripts
    assert "waited for rank 1," in texts[0] + texts[2]
    assert not present_lacking(engine)


CHECKS: list[Check] = [
    is_the_dense_model,
    holders_may_be_few,
    evaluation_leaves_training_alone,
    streaming_cannot_be_differentiated,
    state_dict_is_whole_or_refused,
    evaluation_with_gradients_may_switch_them_off_inside,
    inner_modules_are_dense_or_refused,
    generates,
    saves_pretrained,
    uneven_batches_end_with_an_error,
    leaving_early_is_an_error,
    a_failing_forward_returns_memory,
    a_rank_that_never_comes_is_named,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks)
def test_dense(outcome: str | None) -> None:
    assert outcome is None, outcome
