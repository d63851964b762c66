"""What users do around `engine.replan`: evaluate, look at tensors, save, load, copy, measure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from torch import nn

from sdp_deepspeed import Init
from tests.helpers.models import TOKENS, llama
from tests.helpers.ranks import Rank, run_ranks
from tests.helpers.replanned_runs import Phase, Sequence_, assert_same_run
from tests.helpers.training import assert_identical, dense_state

pytestmark = pytest.mark.slow

CUT: dict[str, Any] = {"regime": "backward", "strategy": "neuron"}
RUN, RUN_BF16 = (Sequence_(2, [Phase({}, 1)], precision) for precision in ("fp32", "bf16"))


def between_evaluations(rank: Rank) -> None:
    """Without going back to training: the next evaluation is of the same dense model, the run goes on as without."""
    engine, other = (RUN.engine(Phase({}), 1) for _ in range(2))
    for each in (engine, other):
        RUN.train(each, 1)
        each.eval()
    with torch.no_grad():
        expected = engine(TOKENS).logits
        other(TOKENS)
        for block in (CUT, {"regime": "forward", "strategy": "block"}):
            engine.replan(block)
            torch.testing.assert_close(engine(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    for each in (engine, other):
        each.train()
    assert RUN.train(engine, 2) == RUN.train(other, 2)
    assert_same_run(engine, other)


def full_tensors(rank: Rank) -> None:
    """Masters and moments that DeepSpeed's functions read are the same numbers; what they write is trained."""
    engine = RUN_BF16.engine(Phase({}), 1)
    RUN_BF16.train(engine, 2)
    named = dict(engine.module.named_parameters())

    def all_of_them() -> dict[str, torch.Tensor]:
        masters = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named.items()}
        moments = {f"{n}.m": safe_get_full_optimizer_state(p, "exp_avg").clone() for n, p in named.items()}
        return masters | moments

    expected = all_of_them()
    for block in ({"strategy": "neuron"}, CUT, {"holders": 2}, {"holders": 1}):
        engine.replan(block)
        assert_identical(all_of_them(), expected)
    name = "model.layers.0.mlp.up_proj.weight"
    safe_set_full_fp32_param(named[name], torch.ones_like(expected[name]))
    assert dense_state(engine)[name].eq(1).all()


def saved_in_the_background(rank: Rank) -> None:
    """What was saved before is of the plan of then, and loads under the new one."""
    asynchronous = {"checkpoint": {"asynchronous": True}}
    engine, other = RUN.engine(Phase(asynchronous), 1), RUN.engine(Phase(CUT), 1)
    RUN.train(engine, 2)
    engine.save_checkpoint(str(rank.folder / "saved"))
    engine.replan(CUT)
    other.load_checkpoint(str(rank.folder / "saved"))
    assert_same_run(engine, other)


def loaded(rank: Rank) -> None:
    """Coverage 1 and back; weights that were loaded meanwhile stay; then a checkpoint of the other plan."""
    engine, other = RUN.engine(Phase({}), 1), RUN.engine(Phase(CUT), 1)
    RUN.train(engine, 1)
    given = {name: value + 1 for name, value in dense_state(engine).items()}
    engine.replan(CUT)
    engine.save_checkpoint(str(rank.folder / "saved"))
    engine.replan({"coverage": 1.0})
    with engine.dense():
        engine.module.load_state_dict(given)
    engine.replan({"coverage": 0.5})
    assert_identical(dense_state(engine), given)
    for each in (engine, other):
        each.load_checkpoint(str(rank.folder / "saved"))
    assert RUN.train(engine, 2) == RUN.train(other, 2)
    assert_same_run(engine, other)


def without_storage() -> nn.Module:
    with Init():
        return llama()


def from_no_storage(rank: Rank) -> None:
    run = Sequence_(2, [Phase({}, 1)], model=without_storage)
    engine, other = run.engine(Phase({}), 1), run.engine(Phase(CUT), 1)
    engine.replan(CUT)
    assert run.train(engine, 2) == run.train(other, 2)
    assert_same_run(engine, other)


def compiled(rank: Rank) -> None:
    """It is compiled anew for the shapes that are there."""
    engine, other = RUN.engine(Phase({}), 1), RUN.engine(Phase(CUT), 1)
    engine.compile(backend="eager")
    other.compile(backend="eager")
    engine.replan(CUT)
    assert RUN.train(engine, 2) == RUN.train(other, 2)
    assert_same_run(engine, other)


def death(rank: Rank) -> None:
    """Of rank 1 in the middle: the others do not wait for a time limit."""
    engine = RUN.engine(Phase({}), 1)
    if rank.rank == 1:
        with mock.patch("sdp_deepspeed.engine.replan.give_state", side_effect=lambda *_: os._exit(1)):
            engine.replan(CUT)
    with pytest.raises(RuntimeError):
        engine.replan(CUT)
    raise AssertionError("rank 0 has noticed")


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    uses = (between_evaluations, full_tensors, saved_in_the_background, loaded, from_no_storage)
    for use in (*uses, compiled):
        yield use.__name__, use


@pytest.mark.checks(2, _cases)
def test_replan_uses(outcome: str | None) -> None:
    assert outcome is None, outcome


def test_a_death_ends_all() -> None:
    assert "rank 0 has noticed" in str(run_ranks(2, [("death", death)])["death"])
