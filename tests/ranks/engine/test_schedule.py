"""The config's schedule: drawn ones agree with the reference at each step, and a run resumes in any phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import logger

from sdp_deepspeed.checkpoint import checkpointer
from sdp_deepspeed.config import KEY
from sdp_deepspeed.engine import schedule_calls
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
            {"until_step": 5, "holders": 1, "strategy": "neuron", "train_micro_batch_size_per_gpu": 1, "stage": 2},
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
    engine, hashes = start(drawn), []
    for steps in range(6):
        hashes.append(engine.plan.hash)
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    assert [hashes[step] == hashes[step + 1] for step in range(5)] == [True, False, True, False, True]
    assert engine.phase == 0
    with mock.patch.object(schedule_calls, "log_dist") as log:
        whole = start(GROWING | {"block": {"holders": 2, "redraw_interval": 1}})
    assert "redraw_interval: no effect" in log.call_args[0][0]
    with mock.patch.object(type(whole), "_replan", side_effect=AssertionError("nothing to draw")):
        train_step(whole, samples_of(0, rank.size)[rank.rank])


def what_cannot_be_is_told_at_start(rank: Rank) -> None:
    """On all ranks, with the phase, and by the engine's constructor."""
    phase = {"until_step": 2, "holders": 1}
    wrong: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
        ([phase, {"holders": 3}], {}, "schedule[1]"),
        ([phase, {"holders": 1, "subnetworks": 7}], {}, "schedule[1]"),
        (
            [phase, {"holders": 2, "train_micro_batch_size_per_gpu": 3}],
            {},
            "schedule[1].train_micro_batch_size_per_gpu",
        ),
        ([phase | {"stage": 2}, {"holders": 2}], {}, "schedule[0].stage: got 2, but the config itself has 1"),
        ([{"until": 0.5, "holders": 1}, {"holders": 2}], {}, "schedule[0].until: got 0.5, but nobody says"),
        (
            [phase, {"holders": 2, "train_micro_batch_size_per_gpu": 1}],
            {"managed_gradient_accumulation": False},
            "the caller accumulates",
        ),
    ]
    for schedule, more, words in wrong:
        given = deepspeed_config(GROWING | {"block": {"schedule": schedule}}) | more
        given["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
        refusal(ValueError, partial(engine_of, given), words)
    given = deepspeed_config(GROWING)
    given["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    refusal(ValueError, partial(engine_of, given, training_data=[1, 2, 3, 4] * 8), "batches of one size")
    schedule = [phase, {"holders": 1 + rank.rank}]
    given = deepspeed_config(GROWING | {"block": {"schedule": schedule}})
    given["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    refusal(ValueError, partial(engine_of, given), "ranks were given different settings", "schedule")


def callers_who_do_not_follow(rank: Rank) -> None:
    """A loop that keeps its batch size, larger or smaller than a phase's; its own accumulation; plans of its own; and
    what would end the run at the phase's end is told at its beginning."""
    engine = start(GROWING)
    refusal(ValueError, lambda: engine.replan({"holders": 2}), "schedule or redraw_interval of the config decides")
    assert engine.zero_optimization_stage() == 1
    for steps in range(3):
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    own = samples_of(3, rank.size)[rank.rank]
    refusal(ValueError, lambda: _steps(engine, own, [2] * 4), "schedule[1]: got a batch of 2 samples", "is 1")
    growing = [{"until_step": 1, "holders": 1}, {"holders": 2, "train_micro_batch_size_per_gpu": 4}]
    engine = start(GROWING | {"block": {"schedule": growing}})
    train_step(engine, own)
    refusal(ValueError, lambda: _steps(engine, own, [2] * 2), "schedule[1]: got a batch of 2 samples", "is 4")
    engine = start(GROWING)
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    refusal(
        ValueError, lambda: _steps(engine, own, [2]), "schedule[0]: a phase has", "the caller accumulates gradients"
    )
    drawn = GROWING | {"block": {"holders": 1, "redraw_interval": 5}}
    for given, path in ((GROWING, "schedule[0]"), (drawn, "redraw_interval")):
        engine = start(given)
        engine.module._compiled_call_impl = engine.module._call_impl
        words = f"{KEY}.{path}: engine.replan: 'the model' was compiled"
        refusal(ValueError, lambda: train_step(engine, own), words)  # noqa: B023


def _steps(engine: Any, samples: torch.Tensor, sizes: list[int]) -> None:
    """Micro-steps of so many samples each."""
    for size in sizes:
        loss = loss_of(engine, samples[:size])
        engine.backward(loss)
        engine.step()


def a_load_that_fails_changes_nothing(rank: Rank) -> None:
    """Nor the phase; a step that has begun is dropped by one that does not; formats may say their step late."""
    straight, other = start(GROWING), start(GROWING)
    for steps in range(4):
        train_step(straight, samples_of(steps, rank.size)[rank.rank])
    straight.save_checkpoint(str(rank.folder / "phases"), tag="4")
    for kind in (ValueError, RuntimeError):
        with mock.patch.object(checkpointer, "restore", side_effect=kind("not this one")):
            refusal(kind, lambda: other.load_checkpoint(str(rank.folder / "phases")), "not this one")
        assert (other.phase, other.zero_optimization_stage(), other.train_micro_batch_size_per_gpu()) == (0, 1, 2)
    own = samples_of(0, rank.size)[rank.rank]
    other.backward(loss_of(other, own[:2]))
    with mock.patch.object(type(other), "before_restore"):
        other.optimizer.zero_grad()
        other.load_checkpoint(str(rank.folder / "phases"))
    assert (other.phase, other.train_micro_batch_size_per_gpu()) == (1, 1)
    other = start(GROWING)
    other.backward(loss_of(other, own[:2]))
    other.load_checkpoint(str(rank.folder / "phases"))
    samples = samples_of(4, rank.size)[rank.rank]
    assert train_step(other, samples) == train_step(straight, samples)
    assert_same_run(straight, other)


def a_turn_that_fails_leaves_the_phase(rank: Rank) -> None:
    """As far as nothing has changed yet; the error says of which phase it is."""
    engine = start(GROWING)
    for steps in range(2):
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    with mock.patch.object(type(engine), "_agree", side_effect=ValueError("no")):
        refusal(ValueError, lambda: train_step(engine, samples_of(2, rank.size)[rank.rank]), "schedule[1]: no")
    assert (engine.phase, engine.zero_optimization_stage(), engine.train_micro_batch_size_per_gpu()) == (0, 1, 2)


def a_save_that_fails_is_told_as_such(rank: Rank) -> None:
    """Not as a mistake in the phase before which it is waited for."""
    engine = start(GROWING)
    for steps in range(2):
        train_step(engine, samples_of(steps, rank.size)[rank.rank])
    full = mock.patch.object(engine.checkpointer, "wait", side_effect=RuntimeError("checkpoint: cannot write"))
    with full, pytest.raises(RuntimeError, match=r"^checkpoint: cannot write"):
        train_step(engine, samples_of(2, rank.size)[rank.rank])
    assert engine.phase == 0


def what_may_end_it_later_is_told_early(rank: Rank) -> None:
    """What was frozen may be thawed in time; sizes of a step that somebody sets are divided at the turn."""
    engine = start(GROWING)
    engine.module.get_parameter("model.norm.weight").requires_grad_(False)
    with mock.patch.object(logger, "warning") as warning:
        train_step(engine, samples_of(0, rank.size)[rank.rank])
    told = [call.args[0] for call in warning.call_args_list if "'model.norm.weight' were frozen" in call.args[0]]
    assert len(told) == (rank.rank == 0)
    engine.module.get_parameter("model.norm.weight").requires_grad_(True)
    growing = [{"until_step": 1, "holders": 1}, {"holders": 2, "train_micro_batch_size_per_gpu": 4}]
    engine = start(GROWING | {"block": {"schedule": growing}})
    engine.set_train_batch_size(2 * rank.size)
    words = "schedule[1]: train_micro_batch_size_per_gpu: got 4", f"{rank.size} ranks cannot take batches of it"
    refusal(ValueError, lambda: _steps(engine, samples_of(0, rank.size)[rank.rank], [2]), *words)


def all_phases_are_shown(rank: Rank) -> None:
    with mock.patch.object(schedule_calls, "announce") as announce:
        start(GROWING)
    assert announce.call_count == (rank.rank == 0)
    if rank.rank == 0:
        assert [words in announce.call_args[0][0] for words in ("1 to 3", "4 to 5", "6 to the end")] == [True] * 3
    with mock.patch.object(schedule_calls, "_memory", return_value=1000):
        refusal(ValueError, lambda: start(GROWING), "schedule[0]: its model state and buffers take")


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Check]]:
    yield "drawn", partial(check_drawn, count=4 if is_thorough() and size == 2 else 2)
    if size == 2:
        yield "resumes_in_any_phase", resumes_in_any_phase
        yield "random_numbers_of_each_rank", random_numbers_of_each_rank
        yield "draws_follow_the_interval", draws_follow_the_interval
        yield "what_cannot_be_is_told_at_start", what_cannot_be_is_told_at_start
        yield "callers_who_do_not_follow", callers_who_do_not_follow
        yield "a_load_that_fails_changes_nothing", a_load_that_fails_changes_nothing
        yield "a_turn_that_fails_leaves_the_phase", a_turn_that_fails_leaves_the_phase
        yield "a_save_that_fails_is_told_as_such", a_save_that_fails_is_told_as_such
        yield "what_may_end_it_later_is_told_early", what_may_end_it_later_is_told_early
        yield "all_phases_are_shown", all_phases_are_shown


@pytest.mark.checks((2, 3, 4), _cases, slow=["2-drawn", "3-drawn", "2-a_load*", "2-callers*", "2-what*", "2-random*"])
def test_schedule(outcome: str | None) -> None:
    assert outcome is None, outcome
