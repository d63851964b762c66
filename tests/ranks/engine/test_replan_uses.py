"""What users do around `engine.replan`: evaluate, look at tensors, save, load, copy, measure."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from torch import nn
from torch.optim.swa_utils import AveragedModel

from benchmarks.common.measured_step import measured_step
from sdp_deepspeed import Init
from tests.helpers.models import TOKENS, llama
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, Sequence_, assert_same_run
from tests.helpers.training import assert_identical, dense_state, refusal

pytestmark = pytest.mark.slow

CUT: dict[str, Any] = {"regime": "backward", "strategy": "neuron"}
RUN, RUN_BF16 = (Sequence_(2, [Phase({}, 1)], precision) for precision in ("fp32", "bf16"))


def between_evaluations(rank: Rank) -> None:
    """Without going back to training: the next evaluation is of the same dense model, the run goes on as without."""
    for evaluation in ("stream", "resident"):
        engine, other = (RUN.engine(Phase({"evaluation": evaluation}), 1) for _ in range(2))
        back = {"regime": "forward", "strategy": "block", "evaluation": evaluation}
        for each in (engine, other):
            RUN.train(each, 1)
            each.eval()
        with torch.no_grad():
            expected = engine(TOKENS).logits
            other(TOKENS)
            for block in (CUT | {"evaluation": "auto"}, back):
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
    with engine.dense(resident=True):
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


def copies(rank: Rank) -> None:
    """One that nobody can reach does not count; one of the dense model goes on as its average."""
    engine = RUN.engine(Phase({}), 1)
    gone = copy.deepcopy(engine.module)
    gone.itself = [gone]
    del gone
    engine.replan({"holders": 2})
    average = AveragedModel(engine.module)
    engine.replan({"holders": 1})
    with engine.dense(resident=True):
        average.update_parameters(engine.module)
    assert_identical(average.module.state_dict(), dense_state(engine))


def measured(rank: Rank) -> None:
    """A step that ends with a re-plan: its figures are those of an engine that keeps its plan, and the losses afterward
    those of one that nobody measured."""
    figures: list[Any] = []
    losses = []
    for replans, measures in ((False, True), (True, True), (True, False)):
        engine = RUN.engine(Phase({}), 1)
        RUN.train(engine, 1)
        if replans:
            engine.step = partial(_step_and_replan, engine)
        with measured_step(engine) if measures else nullcontext() as found:
            RUN.train(engine, 1)
        if replans:
            assert engine.__dict__.pop("step").func is _step_and_replan, "others get back what they put there"
        assert not {"step", "_replan"} & vars(engine).keys()
        assert engine.plan.is_whole == replans
        losses.append(RUN.train(engine, 2))
        figures.append(found)
    kept, changed = figures[:2]
    sent = kept.sent_by_operator | {"send": changed.sent - kept.sent, "recv_": 0}
    assert changed.sent_by_operator == sent, "beside that only words by which ranks meet"
    assert 0 <= sent["send"] < 1000 < kept.weights
    assert replace(changed, process=0, sent=0, sent_by_operator={}) == replace(
        kept, process=0, sent=0, sent_by_operator={}
    )
    assert losses[1] == losses[2]


def _step_and_replan(engine: Any) -> None:
    type(engine).step(engine)
    engine.replan({"holders": 2})


def compiled(rank: Rank) -> None:
    engine = RUN.engine(Phase({}), 1)
    engine.compile(backend="eager")
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "was compiled")


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    uses = (between_evaluations, full_tensors, saved_in_the_background, loaded, from_no_storage, copies, measured)
    for use in (*uses, compiled):
        yield use.__name__, use


@pytest.mark.checks(2, _cases)
def test_replan_uses(outcome: str | None) -> None:
    assert outcome is None, outcome
