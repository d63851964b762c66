"""What `engine.replan` refuses: by name, on all ranks, and the run goes on as if nobody had asked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from tests.helpers import own_layers
from tests.helpers.models import loss_of
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, Sequence_, assert_same_run, tokens_loss
from tests.helpers.training import refusal

Check = Callable[[Rank], None]
RUN = Sequence_(2, [Phase({}, 1)])


def goes_on(refused: Callable[[Any], None], rank: Rank, *, run: Sequence_ = RUN) -> None:
    """What is refused leaves no trace: the run is that of an engine that was never asked."""
    engine, other = (run.engine(Phase({}), 1) for _ in range(2))
    for each in (engine, other):
        run.train(each, 2)
    refused(engine)
    assert engine.block == other.block
    assert run.train(engine, 2) == run.train(other, 2)
    assert_same_run(engine, other)
    engine.replan({"strategy": "neuron"})


def blocks(engine: Any) -> None:
    refused = partial(refusal, ValueError)
    refused(lambda: engine.replan({"holders": 3}), "holders", "3")
    refused(lambda: engine.replan({"colour": 3}), "colour")
    refused(lambda: engine.replan({"coverage": 0.5, "holders": 1}), "one of both")
    refused(lambda: engine.replan({"strategy": "neuron", "neuron_groups": 1000}), "neuron_groups")
    refused(lambda: engine.replan({"subnetworks": 5}), "subnetworks")
    refused(lambda: engine.replan({"dense_branch_scale": "coverage", "regime": "backward"}), "dense_branch_scale")
    refused(lambda: engine.replan({"assignment": "nowhere.json", "holders": None}), "nowhere.json")
    refused(lambda: engine.replan({"checkpoint": {"keep_last": 1}}), "cannot change in a run")
    refused(lambda: engine.replan({}, stage=3), "stages 0, 1 and 2")
    assert engine.zero_optimization_stage() == 1


def rates_of_no_use(engine: Any) -> None:
    """As at start; on one rank only, so that the others must be told."""
    (group,) = engine.optimizer.param_groups
    if engine.dp_group.rank == 1:
        group["relative_step"] = True
    words = "lr_by_coverage: got 'sqrt'", "param group 0", "relative_step", "[on rank 1]"
    refusal(ValueError, lambda: engine.replan({"lr_by_coverage": "sqrt"}), *words)
    group.pop("relative_step", None)
    refusal(ValueError, lambda: engine.replan({"lr_by_coverage": 0.5}), "lr_by_coverage", '"none", "sqrt" or "linear"')
    own = Sequence_(2, [], optimizer=lambda model: torch.optim.Adafactor(model.parameters()))
    refusal(
        ValueError, lambda: own.engine(Phase({"lr_by_coverage": "linear"}), 1), "lr_by_coverage", "'Adafactor'", "bound"
    )


def in_the_middle(engine: Any) -> None:
    with engine.dense(resident=True):
        refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "inside engine.dense()")
    with engine.dense():
        refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "inside engine.dense()")
    engine.backward(tokens_loss(engine, torch.Generator().manual_seed(0)))
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "gradients of a step that has begun")
    engine.zero_grad()


def copies(engine: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(engine.module)
    with engine.dense():
        whole = copy.deepcopy(engine.module)
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "1 copies of engine.module", "export them")
    del average
    inner = torch.optim.swa_utils.AveragedModel(engine.module.model)
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "copies of engine.module or of modules in it")
    del inner
    loss_of(whole, torch.zeros(1, 4, dtype=torch.long))


def changed_by_others(engine: Any) -> None:
    weight = engine.module.get_parameter("model.norm.weight")
    weight.requires_grad_(False)
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "'model.norm.weight' required gradients")
    weight.requires_grad_(True)
    attention = engine.module.get_submodule("model.layers.0.self_attn")
    before = type(attention)
    attention.__class__ = type("Mine", (before,), {})
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "the class of 'model.layers.0.self_attn'")
    attention.__class__ = before
    norm = engine.module.get_submodule("model.norm")
    own, norm.weight = norm.weight, nn.Parameter(norm.weight.detach().clone())
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "model.norm.weight")
    norm.weight = own


def compiled(engine: Any) -> None:
    norm = engine.module.get_submodule("model.norm")
    norm.compile()
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "'model.norm' was compiled")
    norm._compiled_call_impl = None


def in_an_accumulation(rank: Rank) -> None:
    run = Sequence_(2, [Phase({}, 1)], config={"gradient_accumulation_steps": 2})
    engine = run.engine(Phase({}), 2)
    run.train(engine, 1)
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "gradients of a step that has begun")
    run.train(engine, 1)
    engine.replan({"holders": 2})


def described(rank: Rank) -> None:
    """Layers of users: what their descriptions were tried out for at start, and no more."""
    architectures.register(own_layers.Block, own_layers.attention_of(), own_layers.mlp_of())
    run = Sequence_(2, [Phase({}, 1)], model=partial(own_layers.GPT, own_layers.Block), loss=own_loss)
    engine, other = (run.engine(Phase(block), 1) for block in ({}, {"seed": 2, "regime": "backward"}))
    refusal(ValueError, lambda: engine.replan({"strategy": "neuron"}), "h.0 with a part of attention", "tried out")
    engine.replan({"holders": 2})
    engine.replan({"holders": 1, "seed": 2, "regime": "backward"})
    assert run.train(engine, 2) == run.train(other, 2)
    assert_same_run(engine, other)


def own_loss(engine: Any, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(61, (2, 8), generator=generator)
    torch.manual_seed(int(tokens.sum()))  # for dropout
    loss: torch.Tensor = engine(tokens, labels=tokens)
    return loss


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    for refused in (blocks, rates_of_no_use, in_the_middle, copies, changed_by_others, compiled):
        yield refused.__name__, partial(goes_on, refused)
    yield "described", described
    yield "in_an_accumulation", in_an_accumulation


@pytest.mark.checks(2, _cases)
def test_refused(outcome: str | None) -> None:
    assert outcome is None, outcome
