"""Vision models in the engine, in all modes: buffers that no state dict has, parameters that are a layer's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sdp_deepspeed
from tests.helpers.models import batches, inputs_of
from tests.helpers.more_models import SPECIMENS
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, sgd, train

MODES = tuple(itertools.product(("forward", "backward"), ("block", "neuron")))
NAMES = ("convnext", "swin", "swinv2")


def start(name: str, regime: str, strategy: str, **block: Any) -> Any:
    return engine_of(sgd(regime=regime, strategy=strategy, **block), SPECIMENS[name].build())


@torch.no_grad()
def logits(model: Any, rank: Rank) -> torch.Tensor:
    (batch,) = next(batches(rank.size, 1))[rank.rank]
    model.eval()
    found: torch.Tensor = model(**inputs_of(model, batch)).logits
    model.train()
    return found


def resumes_in_another_mode(rank: Rank, name: str) -> None:
    for mode, another in ((MODES[1], MODES[2]), (MODES[3], MODES[0])):
        engine = start(name, *mode)
        train(engine, num_steps=2)
        folder, dense = rank.folder / "-".join((name, *mode)), dense_state(engine)
        engine.save_checkpoint(str(folder))
        resumed = start(name, *mode)
        resumed.load_checkpoint(str(folder))
        assert train(engine, num_steps=1, first=2) == train(resumed, num_steps=1, first=2)
        other = start(name, *another)
        other.load_checkpoint(str(folder))
        assert_identical(dense_state(other), dense)


def the_dense_model_is_whole_and_loads_without_us(rank: Rank, name: str) -> None:
    for regime, strategy in MODES:
        engine = start(name, regime, strategy)
        train(engine, num_steps=2)
        found = [logits(engine, rank)]
        with engine.dense():
            found.append(logits(engine.module, rank))
        folder = rank.folder / f"{name}-{regime}-{strategy}"
        engine.save_pretrained(folder)
        dist.barrier()
        found.append(logits(SPECIMENS[name].model.from_pretrained(folder), rank))
        assert all(torch.equal(one, found[0]) for one in found)


def scaled_branches_are_those_that_coverage_says(rank: Rank) -> None:
    for name, strategy in itertools.product(("convnext", "swin"), ("block", "neuron")):
        engine = start(name, "forward", strategy, dense_branch_scale="coverage")
        plain = start(name, "forward", strategy)
        assert train(engine, num_steps=1) == train(plain, num_steps=1)
        scaled, state = dense_state(engine), dense_state(plain)
        for key, value in scaled.items():
            is_output = key.endswith(("pwconv2.weight", "o_proj.weight", "fc2.weight"))
            is_bias = key.endswith(("pwconv2.bias", "o_proj.bias", "fc2.bias")) and strategy == "block"
            assert torch.equal(value, state[key] * (0.5 if is_output or is_bias else 1)), key


def starts_without_the_dense_model(rank: Rank, name: str) -> None:
    """With the same weights in every layout, and the buffers that a constructor makes."""
    specimen, states = SPECIMENS[name], []
    buffers = dict(specimen.build().named_buffers())
    for mode in MODES:
        torch.manual_seed(3)
        with sdp_deepspeed.Init():
            model = specimen.model(specimen.config(**specimen.options))
        torch.manual_seed(3)
        engine = engine_of(sgd(regime=mode[0], strategy=mode[1]), model)
        with engine.dense():
            assert_identical(dict(engine.module.named_buffers()), buffers)
        states.append(dense_state(engine))
        assert_identical(states[-1], states[0])
        train(engine, num_steps=2)


def plans_change(rank: Rank, name: str) -> None:
    engine = start(name, *MODES[0])
    for regime, strategy in (*MODES[1:], MODES[1], MODES[0]):
        train(engine, num_steps=1)
        before = dense_state(engine)
        engine.replan({"regime": regime, "strategy": strategy})
        assert_identical(dense_state(engine), before)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    of_names = (
        resumes_in_another_mode,
        the_dense_model_is_whole_and_loads_without_us,
        starts_without_the_dense_model,
        plans_change,
    )
    for check, name in itertools.product(of_names, NAMES):
        yield f"{check.__name__}-{name}", partial(check, name=name)
    yield "scaled_branches", scaled_branches_are_those_that_coverage_says


@pytest.mark.checks((2,), _cases, slow=["*swinv2", "*plans_change*", "*starts_without*", "*dense_model*", "*convnext"])
def test_engine(outcome: str | None) -> None:
    assert outcome is None, outcome
