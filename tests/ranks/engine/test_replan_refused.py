"""What `engine.replan` refuses: by name, on all ranks, and the run goes on as if nobody had asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed import architectures
from tests.helpers import own_layers
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
    refused(lambda: engine.replan({"holders": 3}), "holders")
    refused(lambda: engine.replan({"colour": 3}), "colour")
    refused(lambda: engine.replan({"coverage": 0.5, "holders": 1}), "coverage", "holders")
    refused(lambda: engine.replan({"strategy": "neuron", "neuron_groups": 1000}), "neuron_groups")
    refused(lambda: engine.replan({"subnetworks": 5}), "subnetworks")
    refused(lambda: engine.replan({"dense_branch_scale": "coverage", "regime": "backward"}), "dense_branch_scale")
    refused(lambda: engine.replan({"assignment": "nowhere.json", "holders": None}), "nowhere.json")
    refused(lambda: engine.replan({"checkpoint": {"keep_last": 1}}), "cannot change in a run")
    refused(lambda: engine.replan({}, stage=3), "stage", "3")
    assert engine.zero_optimization_stage() == 1


def in_the_middle(engine: Any) -> None:
    with engine.dense():
        refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "inside engine.dense()")
    with engine.dense():
        refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "inside engine.dense()")
    engine.backward(tokens_loss(engine, torch.Generator().manual_seed(0)))
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "gradients of an unfinished step")
    engine.zero_grad()


def changed_by_others(engine: Any) -> None:
    weight = engine.module.get_parameter("model.norm.weight")
    weight.requires_grad_(False)
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "'model.norm.weight' required gradients")
    weight.requires_grad_(True)
    norm = engine.module.get_submodule("model.norm")
    own, norm.weight = norm.weight, nn.Parameter(norm.weight.detach().clone())
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "model.norm.weight")
    norm.weight = own


def in_an_accumulation(rank: Rank) -> None:
    run = Sequence_(2, [Phase({}, 1)], config={"gradient_accumulation_steps": 2})
    engine = run.engine(Phase({}), 2)
    run.train(engine, 1)
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "gradients of an unfinished step")
    run.train(engine, 1)
    engine.replan({"holders": 2})


def described(rank: Rank) -> None:
    """Layers of users."""
    architectures.register(own_layers.Block, own_layers.attention_of(), own_layers.mlp_of())
    run = Sequence_(2, [Phase({}, 1)], model=partial(own_layers.GPT, own_layers.Block), loss=own_loss)
    engine, other = (run.engine(Phase(block), 1) for block in ({}, {"seed": 2, "regime": "backward"}))
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
    for refused in (blocks, in_the_middle, changed_by_others):
        yield refused.__name__, partial(goes_on, refused)
    yield "described", described
    yield "in_an_accumulation", in_an_accumulation


@pytest.mark.checks(2, _cases)
def test_refused(outcome: str | None) -> None:
    assert outcome is None, outcome
