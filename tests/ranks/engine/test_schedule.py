"""The config's schedule: runs agree with the reference at each step, and a run resumes in any phase."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.planner import plan_model
from tests.helpers import models, oracle
from tests.helpers.models import LENGTH, VOCABULARY, batches, parsed
from tests.helpers.oracle import DTYPES, Run, loss_of, optimizer_of
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import assert_same_run
from tests.helpers.training import assert_identical, dense_state, micro_step, refusal
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.world(2)
NUM_STEPS, MICRO_BATCH, ACCUMULATION = 6, 2, 2
CASE = Case(2, 1, accumulation=ACCUMULATION, buckets="many")
GROWING: dict[str, Any] = {
    "schedule": [
        {"until_step": 3, "holders": 1, "stage": 1},
        {"until_step": 5, "holders": 1, "strategy": "neuron", "stage": 2},
        {"holders": 2, "stage": 0},
    ],
    "redraw_interval": 2,
}
CASE_IN_BF16 = replace(CASE, stage=2, precision="bf16", optimizer="SGD")
IN_BF16: dict[str, Any] = {
    "schedule": [
        {"until_step": 1, "holders": [{"units": r"layers\.0\.", "holders": 1}], "regime": "backward", "stage": 2},
        {"until_step": 3, "holders": 2, "strategy": "neuron", "seed": 3, "stage": 0},
        {"holders": 1, "regime": "backward", "strategy": "neuron", "stage": 1},
    ],
}
OF_PHASE = ("until_step", "stage")  # what a block has not


def plan_after(block: dict[str, Any], steps: int, model: nn.Module, size: int) -> Plan:
    """Who holds what in the step after so many, by the words of the schedule and not by ours."""
    phase: dict[str, Any] = next(each for each in block["schedule"] if steps < each.get("until_step", 99))
    keys = {key: value for key, value in phase.items() if key not in OF_PHASE}
    interval = block.get("redraw_interval")
    keys["seed"] = keys.get("seed", 0) + (0 if interval is None else steps // interval)
    return plan_model(model, parsed(**keys), size)[0]


def start(block: dict[str, Any], case: Case = CASE) -> Any:
    return oracle.start(case, case.specimen.build(), **({"holders": None} | block))


def samples_of(step: int, size: int) -> torch.Tensor:
    """[ranks, samples of a step, T] token ids."""
    shape = (size, MICRO_BATCH * ACCUMULATION, LENGTH)
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(step))


def train_step(engine: Any, samples: torch.Tensor) -> list[float]:
    return [micro_step(engine, batch) for batch in samples.split(MICRO_BATCH)]


@pytest.mark.world(2, 3, slow=(3,))
@pytest.mark.parametrize(("case", "block"), [(CASE, GROWING), (CASE_IN_BF16, IN_BF16)], ids=["growing", "bf16"])
def test_agrees_with_the_reference(rank: Rank, case: Case, block: dict[str, Any]) -> None:
    """Losses of each micro-batch and the norm of each step, and the dense model at the end."""
    case = replace(case, ranks=rank.size)
    dense = case.specimen.build()
    plans = {steps: plan_after(block, steps, dense, rank.size) for steps in range(NUM_STEPS)}
    engine, dense = start(block, case), dense.to(DTYPES.get(case.precision, torch.float32))
    make, loss = partial(optimizer_of, case), partial(loss_of, case)
    run = Run(case, engine, Reference(dense, plans[0], make, loss, case.clip, later=plans), rank.rank)
    for steps, step in enumerate(itertools.islice(batches(rank.size, ACCUMULATION), NUM_STEPS)):
        assert engine.plan.hash == plans[steps].hash, steps
        phase = block["schedule"][engine.phase]
        assert engine.zero_optimization_stage() == phase["stage"]
        assert engine.optimizer.sharded.options.stage == max(1, phase["stage"])
        samples = [[(tokens, 1.0) for tokens in own] for own in step]
        run.train_step(steps, samples)
        assert engine.global_steps == steps + 1
    run.compare_dense(samples)


def test_resumes_in_any_phase(rank: Rank) -> None:
    """Bit for bit, with the random numbers of each rank, into an engine that stands in another phase, or in a step; a
    load that fails leaves its phase."""
    straight, other = start(GROWING), start(GROWING)
    losses: list[list[float]] = []
    for steps in range(7):
        straight.save_checkpoint(str(rank.folder / "run"), tag=f"{steps}")
        losses.append(train_step(straight, samples_of(steps, rank.size)[rank.rank]))
        torch.manual_seed(100 * steps + rank.rank)
    for steps in (6, 3, 1, 4):
        other.backward(models.loss_of(other, samples_of(0, rank.size)[rank.rank][:2]))
        phase = other.phase, other.zero_optimization_stage()
        refusal(ValueError, lambda: other.load_checkpoint(str(rank.folder / "run"), tag="7"), "7")
        assert phase == (other.phase, other.zero_optimization_stage())
        other.load_checkpoint(str(rank.folder / "run"), tag=f"{steps}")
        assert other.phase == (0 if steps < 3 else 1 if steps < 5 else 2)
        if steps == 4:  # restored on the same layout alone, so the engine is in that phase before it loads
            found, generator = torch.rand(4), torch.Generator().manual_seed(100 * 3 + rank.rank)
            assert torch.equal(found, torch.rand(4, generator=generator))
        for step in range(steps, 7):
            assert train_step(other, samples_of(step, rank.size)[rank.rank]) == losses[step], (steps, step)
        assert_same_run(straight, other)
    assert_identical(dense_state(straight), dense_state(other))


def test_draws_follow_the_interval(rank: Rank) -> None:
    engine, hashes, draws = start({"holders": 1, "redraw_interval": 2}), set(), []
    with mock.patch("sdp_deepspeed.planner.announce") as announced:
        for steps in range(6):
            hashes.add(engine.plan.hash)
            draws.append(engine._plans.draw)
            train_step(engine, samples_of(steps, rank.size)[rank.rank])
    assert not announced.called, "a table of the plan for each draw"
    assert draws == [0, 0, 1, 1, 2, 2]
    assert len(hashes) > 1
    assert engine.phase == 0
    whole = start({"holders": 2, "redraw_interval": 1})
    with mock.patch("sdp_deepspeed.engine.plans.Plans._change_plan", side_effect=AssertionError("nothing to draw")):
        train_step(whole, samples_of(0, rank.size)[rank.rank])


def test_a_turn_that_fails_leaves_the_phase(rank: Rank) -> None:
    """The error says of which phase it is, and nothing has changed."""
    engine = start(GROWING)
    for steps in range(2):
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    with mock.patch("sdp_deepspeed.engine.core.Core.plan_and_mask", side_effect=ValueError("no")):
        refusal(ValueError, lambda: train_step(engine, samples_of(2, rank.size)[rank.rank]), "schedule[1]: no")
    assert (engine.phase, engine.zero_optimization_stage()) == (0, 1)
