"""The config's schedule: drawn ones agree with the reference at each step, and a run resumes in any phase."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.models import LENGTH, SPECIMENS, VOCABULARY, config, loss_of, two_groups
from tests.helpers.oracle import make_optimizer
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import assert_same_run
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, refusal

pytestmark = pytest.mark.world(2)
GROWING: dict[str, Any] = {
    "block": {
        "schedule": [
            {"until_step": 3, "holders": 1},
            {"until_step": 5, "holders": 1, "strategy": "neuron", "stage": 2},
            {"holders": 2, "stage": 0},
        ],
        "redraw_interval": 2,
    },
    "stage": 1,
    "micro_batch": 2,
    "precision": "fp32",
}


SAMPLES = 4  # of a rank in a step
OF_PHASE = ("until_step", "stage")  # what a block has not
Drawn = Mapping[str, Any]


@st.composite
def phases(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """A phase's keys."""
    some = st.integers(1, size)
    holders = draw(some | st.tuples(some, some).map(lambda ends: [{"units": r"layers\.0\.", "holders": ends[0]}]))
    return {
        "holders": holders,
        "regime": draw(st.sampled_from(["forward", "backward"])),
        "strategy": draw(st.sampled_from(["block", "neuron"])),
        "seed": draw(st.integers(0, 3)),
        "stage": draw(st.integers(0, 2)),
    }


@st.composite
def schedules(draw: st.DrawFn, size: int) -> dict[str, Any]:
    """Of five steps, with the precision of the run and what the config itself says."""
    first, *later = draw(st.lists(phases(size), min_size=2, max_size=3))
    ends = sorted(draw(st.sets(st.integers(1, 4), min_size=len(later), max_size=len(later))))
    interval = draw(st.none() | st.integers(1, 3))
    block = {
        "schedule": [*({"until_step": end} | each for end, each in zip(ends, [first, *later], strict=False)), later[-1]]
    }
    return {
        "block": block | ({} if interval is None else {"redraw_interval": interval}),
        "stage": first["stage"],
        "micro_batch": draw(st.sampled_from([1, 2, 4])),
        "precision": draw(st.sampled_from(["fp32", "bf16"])),
    }


def plan_after(drawn: Drawn, steps: int, model: nn.Module, size: int) -> Plan:
    """Who holds what in the step after so many, by the words of the schedule and not by ours."""
    keys = {key: value for key, value in phase_after(drawn, steps).items() if key not in OF_PHASE}
    interval = drawn["block"].get("redraw_interval")
    keys["seed"] += 0 if interval is None else steps // interval
    block = parse({KEY: keys})
    assert block is not None
    return plan_model(model, block, size)[0]


def phase_after(drawn: Drawn, steps: int) -> dict[str, Any]:
    """Of the step after so many."""
    phase: dict[str, Any] = next(each for each in drawn["block"]["schedule"] if steps < each.get("until_step", 99))
    return phase


def deepspeed_config(drawn: Drawn) -> dict[str, Any]:
    """The config of a run, with a client optimizer."""
    result = {key: value for key, value in config(**drawn["block"]).items() if key != "optimizer"}
    result |= {
        "train_micro_batch_size_per_gpu": drawn["micro_batch"],
        "gradient_accumulation_steps": SAMPLES // drawn["micro_batch"],
        "zero_optimization": {"stage": drawn["stage"], "reduce_bucket_size": 500},
        "gradient_clipping": 0.5,
    }
    return result | ({"bf16": {"enabled": True}} if drawn["precision"] == "bf16" else {})


def optimizer_name(drawn: Drawn) -> str:
    """bf16 with AdamW drifts wherever a gradient is rounded another way."""
    return "AdamW" if drawn["precision"] == "fp32" else "SGD"


def start(drawn: Drawn) -> Any:
    model = SPECIMENS["llama"].build()
    optimizer = make_optimizer(optimizer_name(drawn), two_groups(dict(model.named_parameters())))
    return engine_of(deepspeed_config(drawn), model, optimizer=optimizer, model_parameters=None)


def samples_of(step: int, size: int) -> torch.Tensor:
    """[ranks, SAMPLES, T] token ids."""
    return torch.randint(0, VOCABULARY, (size, SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def train_step(engine: Any, samples: torch.Tensor) -> list[float]:
    losses = []
    for batch in samples.split(engine.train_micro_batch_size_per_gpu()):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def check_schedule(drawn: Drawn, rank: Rank) -> None:
    """Losses of each micro-batch and the norm of each step, and the dense model at the end."""
    dense = SPECIMENS["llama"].build()
    plans = {steps: plan_after(drawn, steps, dense, rank.size) for steps in range(5)}
    if drawn["precision"] == "bf16":
        dense = dense.to(torch.bfloat16)
    engine, rounding = start(drawn), 2.0**-24 if drawn["precision"] == "fp32" else 2.0**-8
    reference = Reference(
        dense,
        plans[0],
        lambda named: make_optimizer(optimizer_name(drawn), two_groups(named)),
        loss_of,
        clip=0.5,
        later=plans,
    )
    for steps in range(5):
        assert engine.plan.hash == plans[steps].hash, steps
        phase = drawn["block"]["schedule"][engine.phase]
        assert engine.zero_optimization_stage() == phase["stage"]
        assert engine.optimizer.sharded.stage == max(1, phase["stage"])
        micro_batch = engine.train_micro_batch_size_per_gpu()
        samples = samples_of(steps, rank.size)
        expected, norm = reference.step([own.split(micro_batch) for own in samples])
        losses = train_step(engine, samples[rank.rank])
        assert engine.global_steps == steps + 1
        # As tests/helpers/oracle.py: sums in another order; in bf16 weights that round the other way.
        loss_tolerance, norm_tolerance = (1e-5, 2e-5) if rounding < 1e-6 else (4.1 * rounding, 6 * rounding)
        assert max(abs(a - b) for a, b in zip(losses, expected[rank.rank], strict=True)) <= loss_tolerance
        assert abs(engine.get_global_grad_norm() - norm) <= norm_tolerance * norm, (engine.get_global_grad_norm(), norm)
    # Weights near 1 and steps near 0.01: in bf16 one that rounds the other way, now and then.
    absolute, relative = (2e-5, 0.0) if rounding < 1e-6 else (4e-3, 2 * rounding)
    torch.testing.assert_close(dense_state(engine), dict(dense.state_dict()), atol=absolute, rtol=relative)


@pytest.mark.world(2, 3, 4, slow=(2, 3))
def test_drawn(rank: Rank) -> None:
    """Hypothesis draws the same on all ranks, which agree on whether one failed; nothing is shrunk."""

    @seed(rank.size)
    @settings(
        max_examples=4 if rank.size == 2 else 2,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schedules(rank.size))
    def check(drawn: Drawn) -> None:
        problem = None
        try:
            check_schedule(drawn, rank)
        except Exception as error:
            problem = f"{drawn}: {type(error).__name__}: {error}"
        problems = [each for each in gathered(problem) if each is not None]
        assert not problems, problems[0]

    check()


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
        other.backward(loss_of(other, samples_of(0, rank.size)[rank.rank][:2]))
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
    drawn = GROWING | {"block": {"holders": 1, "redraw_interval": 2}}
    engine, hashes, draws = start(drawn), set(), []
    for steps in range(6):
        hashes.add(engine.plan.hash)
        draws.append(engine.draw)
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    assert draws == [0, 0, 1, 1, 2, 2]
    assert len(hashes) > 1
    assert engine.phase == 0
    whole = start(GROWING | {"block": {"holders": 2, "redraw_interval": 1}})
    with mock.patch("sdp_deepspeed.engine.replan.replan", side_effect=AssertionError("nothing to draw")):
        train_step(whole, samples_of(0, rank.size)[rank.rank])


@pytest.mark.slow
def test_what_cannot_be_is_told_at_start(rank: Rank) -> None:
    """On all ranks, by the engine's constructor."""
    phase = {"until_step": 2, "holders": 1}
    wrong: list[tuple[list[dict[str, Any]], str]] = [
        ([phase, {"holders": 3}], "schedule[1]"),
        ([phase, {"holders": 1, "subnetworks": 7}], "schedule[1]"),
        ([phase, {"holders": 2, "train_micro_batch_size_per_gpu": 1}], "train_micro_batch_size_per_gpu: unknown key"),
        ([phase | {"stage": 2}, {"holders": 2}], "schedule[0].stage: got 2, but zero_optimization.stage is 1"),
        ([{"until": 0.5, "holders": 1}, {"holders": 2}], "schedule[0].until: got 0.5"),
        ([phase, {"holders": 1 + rank.rank}], "rank 1"),
    ]
    for schedule, words in wrong:
        given = deepspeed_config(GROWING | {"block": {"schedule": schedule}})
        given["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        refusal((ValueError, RuntimeError), partial(engine_of, given), words)
    engine = start(GROWING)
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "schedule")


def test_a_turn_that_fails_leaves_the_phase(rank: Rank) -> None:
    """The error says of which phase it is, and nothing has changed."""
    engine = start(GROWING)
    for steps in range(2):
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    with mock.patch("sdp_deepspeed.engine.replan.plan_and_mask", side_effect=ValueError("no")):
        refusal(ValueError, lambda: train_step(engine, samples_of(2, rank.size)[rank.rank]), "schedule[1]: no")
    assert (engine.phase, engine.zero_optimization_stage()) == (0, 1)
