"""Ranks that do not do the same end with an error that says which, in which step, and what it did last."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import logger
from torch import nn

from sdp_deepspeed.distributed import last_acts, monitored_barrier
from tests.helpers.models import loss_of
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.training import engine_of, micro_step, own_batches, refusal, sgd, train

pytestmark = pytest.mark.slow

QUICK: dict[str, Any] = {
    "BEAT_SECONDS": 0.1,
    "NOTICE_SECONDS": 0.3,
    "SETTLED_SECONDS": 0.5,
    "SLICE": timedelta(seconds=0.2),
}


def a_rank_that_is_late_is_named_and_waited_for(rank: Rank) -> None:
    said: list[str] = []
    with mock.patch.multiple(last_acts, **QUICK), mock.patch.object(logger, "warning", said.append):
        engine = engine_of(sgd())
        train(engine, num_steps=1)
        if rank.rank == 1:
            time.sleep(1.5)
        train(engine, num_steps=1, first=1)
        assert engine.global_steps == 2
    place = r"rank 1, which ended its step (step 1, micro-step 1)"
    mine = [text for text in said if text.startswith("rank 0 waited (began its step (step 2, micro-step 2)) for")]
    assert [place in text for text in mine] == [True] * (rank.rank == 0), said


def a_micro_step_more_on_one_rank(rank: Rank) -> None:
    with mock.patch.multiple(last_acts, **QUICK):
        engine = engine_of(sgd(stage=2))
        train(engine, num_steps=1)
        (batch,) = own_batches(rank, 1)

        def go_on() -> None:
            if rank.rank == 1:
                engine.backward(loss_of(engine, batch))
                engine.backward(loss_of(engine, batch))
            else:
                micro_step(engine, batch)

        other = "step" if rank.rank == 1 else "backward pass"
        refusal(RuntimeError, go_on, f"for rank {1 - rank.rank}, which began its {other} (step 2, micro-step 2)")


def alone(engine: Any) -> str:
    """What a rank hears that asks for the dense model by itself."""
    with pytest.raises(RuntimeError) as caught, engine.dense(resident=True):
        pass
    said = str(caught.value)
    for words in ("waited for rank 1, which did not come", "call it on every rank, not below `if rank == 0`"):
        assert words in said
    return said


@contextmanager
def quick_engine() -> Iterator[Any]:
    """One that has trained a step; ranks look often what the others do."""
    with mock.patch.multiple(last_acts, **QUICK), mock.patch.object(monitored_barrier, "LOOK_SECONDS", 0.1):
        engine = engine_of(sgd())
        train(engine, num_steps=1)
        yield engine


def others_train_on(rank: Rank) -> None:
    with quick_engine() as engine:
        if rank.rank == 0:
            assert alone(engine).endswith("Last seen: rank 1 began its step (step 2, micro-step 2)")
        else:
            with pytest.raises(
                RuntimeError, match="for rank 0, which asked for the whole dense model: waited for rank 1"
            ):
                train(engine, num_steps=1, first=1)


def a_rank_that_dies(rank: Rank) -> None:
    engine = engine_of(sgd(stage=2))
    train(engine, num_steps=1)
    (batch,) = own_batches(rank, 1)

    def stop(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    if rank.rank == 1:
        engine.module.lm_head.weight.register_hook(stop)
        with pytest.raises(ArithmeticError):
            engine.backward(loss_of(engine, batch))
        os._exit(3)
    engine.backward(loss_of(engine, batch))


def a_rank_that_refuses_a_step(rank: Rank) -> None:
    """What only it can see; it ends at once, before its thread could tell the others why."""
    engine = engine_of(sgd())
    train(engine, num_steps=1)
    (batch,) = own_batches(rank, 1)
    engine.backward(loss_of(engine, batch))
    if rank.rank == 1:
        engine.module.lm_head.weight = nn.Parameter(engine.module.lm_head.weight.detach().clone())
        with pytest.raises(RuntimeError, match="does not have the Parameters"):
            engine.step()
        os._exit(3)
    engine.step()


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        a_rank_that_is_late_is_named_and_waited_for,
        a_micro_step_more_on_one_rank,
    ):
        yield check.__name__, check


def test_one_rank_alone_while_others_train_on() -> None:
    """Ranks of their own: a collective of theirs never ends."""
    assert run_ranks(2, [("train on", others_train_on)]) == {"train on": None}


def test_a_rank_that_dies_is_named() -> None:
    (why,) = run_ranks(2, [("dies", a_rank_that_dies)]).values()
    place = "began its backward pass (step 2, micro-step 2)"
    assert f"rank 0 waited ({place}) for rank 1, which {place}: ArithmeticError: on purpose, " in str(why)


def test_a_rank_that_refuses_a_step_is_named() -> None:
    (why,) = run_ranks(2, [("refuses", a_rank_that_refuses_a_step)]).values()
    place = "began its step (step 2, micro-step 2)"
    words = f"rank 0 waited ({place}) for rank 1, which {place}: RuntimeError: the model does not have the Parameters"
    assert words in str(why)


@pytest.mark.checks(2, _cases)
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
