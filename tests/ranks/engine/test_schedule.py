"""The config's schedule: drawn ones agree with the reference at each step, and a run resumes in any phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.helpers.models import loss_of
from tests.helpers.properties import is_thorough
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import assert_same_run
from tests.helpers.schedules import check_drawn, deepspeed_config, samples_of, start, train_step
from tests.helpers.training import assert_identical, dense_state, engine_of, refusal

Check = Callable[[Rank], None]
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


def resumes_in_any_phase(rank: Rank) -> None:
    """Bit for bit, with the random numbers of each rank, also into an engine that stands in a later phase."""
    straight, other = start(GROWING), start(GROWING)
    losses: list[list[float]] = []
    for steps in range(7):
        straight.save_checkpoint(str(rank.folder / "run"), tag=f"{steps}")
        torch.manual_seed(100 * steps + rank.rank)
        losses.append(train_step(straight, samples_of(steps, rank.size)[rank.rank]))
    for steps in (6, 3, 1, 4):
        other.load_checkpoint(str(rank.folder / "run"), tag=f"{steps}")
        assert other.phase == (0 if steps < 3 else 1 if steps < 5 else 2)
        for step in range(steps, 7):
            assert train_step(other, samples_of(step, rank.size)[rank.rank]) == losses[step], (steps, step)
        assert_same_run(straight, other)
    assert_identical(dense_state(straight), dense_state(other))


def random_numbers_of_each_rank(rank: Rank) -> None:
    """They are restored on the same layout alone, so the engine is in the phase before it loads."""
    engine = start(GROWING)
    for steps in range(3):
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    torch.manual_seed(7 + rank.rank)
    engine.save_checkpoint(str(rank.folder / "numbers"))
    expected = torch.rand(4)
    again = start(GROWING)
    torch.manual_seed(99)
    again.load_checkpoint(str(rank.folder / "numbers"))
    assert torch.equal(torch.rand(4), expected)


def draws_follow_the_interval(rank: Rank) -> None:
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


def what_cannot_be_is_told_at_start(rank: Rank) -> None:
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


def a_load_that_fails_changes_nothing(rank: Rank) -> None:
    """Nor the phase; a step that has begun is dropped by one that does not."""
    straight, other = start(GROWING), start(GROWING)
    for steps in range(4):
        train_step(straight, samples_of(steps, rank.size)[rank.rank])
    straight.save_checkpoint(str(rank.folder / "phases"), tag="4")
    refusal(ValueError, lambda: other.load_checkpoint(str(rank.folder / "phases"), tag="5"), "5")
    assert (other.phase, other.zero_optimization_stage()) == (0, 1)
    other.backward(loss_of(other, samples_of(0, rank.size)[rank.rank][:2]))
    other.load_checkpoint(str(rank.folder / "phases"))
    assert (other.phase, other.zero_optimization_stage()) == (1, 2)
    samples = samples_of(4, rank.size)[rank.rank]
    assert train_step(other, samples) == train_step(straight, samples)
    assert_same_run(straight, other)


def a_turn_that_fails_leaves_the_phase(rank: Rank) -> None:
    """The error says of which phase it is, and nothing has changed."""
    engine = start(GROWING)
    for steps in range(2):
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    with mock.patch.object(type(engine), "plan_and_mask", side_effect=ValueError("no")):
        refusal(ValueError, lambda: train_step(engine, samples_of(2, rank.size)[rank.rank]), "schedule[1]: no")
    assert (engine.phase, engine.zero_optimization_stage()) == (0, 1)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    yield "drawn", partial(check_drawn, count=4 if is_thorough() and size == 2 else 2)
    if size == 2:
        yield "resumes_in_any_phase", resumes_in_any_phase
        yield "random_numbers_of_each_rank", random_numbers_of_each_rank
        yield "draws_follow_the_interval", draws_follow_the_interval
        yield "what_cannot_be_is_told_at_start", what_cannot_be_is_told_at_start
        yield "a_load_that_fails_changes_nothing", a_load_that_fails_changes_nothing
        yield "a_turn_that_fails_leaves_the_phase", a_turn_that_fails_leaves_the_phase


@pytest.mark.checks((2, 3, 4), _cases, slow=["2-drawn", "3-drawn", "2-a_load*", "2-what*", "2-random*"])
def test_schedule(outcome: str | None) -> None:
    assert outcome is None, outcome
