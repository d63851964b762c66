"""What a config is in each step: phases, shares of all steps, new draws, and what is wrong with them; and what a
program's number of steps is written into."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.config.schedule import Schedule, fill_total_steps

GROWING: list[dict[str, Any]] = [{"until_step": 4, "coverage": 0.5}, {"until_step": 6, "holders": 3}, {"coverage": 1.0}]


def config(phases: Any = None, **block: Any) -> dict[str, Any]:
    return {KEY: block if phases is None else {**block, "schedule": phases}}


def schedule(phases: Any = None, more: Any = None, **block: Any) -> Schedule:
    given = config(phases, **block) | (more or {})
    assert parse(given) is not None
    result = Schedule.of(given)
    assert result is not None
    return result


def message(phases: Any = None, **block: Any) -> str:
    with pytest.raises(ValueError, match=KEY) as caught:
        schedule(phases, **block)
    return str(caught.value)


def test_without_a_schedule_or_switched_off_nothing_changes() -> None:
    assert Schedule.of(config(coverage=0.5)) is None
    assert parse(config(GROWING, enabled=False)) is None


@pytest.mark.parametrize(
    ("block", "more"),
    [
        ({"total_steps": 10}, {}),
        ({"total_steps": 10}, {"scheduler": {"params": {"total_num_steps": 90}}}),
        ({"total_steps": "auto"}, {"scheduler": {"params": {"total_num_steps": 10}}}),
        ({}, {"scheduler": {"params": {"total_num_steps": 10}}}),
    ],
)
def test_shares_are_of_all_steps(block: dict[str, Any], more: dict[str, Any]) -> None:
    phases = [{"until": 0.28, "coverage": 0.5}, {"until_step": 4, "coverage": 0.75}, {"coverage": 1.0}]
    found = schedule(phases, more, **block)
    assert [phase.until_step for phase in found.phases] == [3, 4, None]
    assert "total_steps" not in found.config_after(0)[KEY]


def test_a_number_of_steps_that_nothing_is_a_share_of() -> None:
    text = message([{"until_step": 3, "coverage": 0.5}, {"coverage": 1.0}], total_steps=10)
    assert "total_steps: got 10, but no phase uses until" in text
    assert "total_steps: got 10, but no phase uses until" in message(None, total_steps=10, coverage=0.5)


def test_a_phase_after_the_last_step() -> None:
    phases = [{"until": 0.5, "coverage": 0.5}, {"until_step": 10, "coverage": 0.75}, {"coverage": 1.0}]
    words = f"{KEY}.schedule: the run has 10 steps ({KEY}.total_steps), but the last phase would begin after step 10"
    assert words in message(phases, total_steps=10)
    config = {"scheduler": {"params": {"total_num_steps": 10}}, KEY: {"schedule": phases}}
    with pytest.raises(ValueError, match=r"the run has 10 steps \(scheduler\.params\.total_num_steps\)"):
        Schedule.of(config)


def test_shares_of_an_unknown_number_are_refused() -> None:
    for block in ({}, {"total_steps": "auto"}):
        text = message([{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}], **block)
        assert f"{KEY}.schedule[0].until: got 0.5" in text
        assert "total_steps" in text


def test_draws_change_the_seed() -> None:
    """What is tried out at start is each phase, and a draw."""
    found = schedule(redraw_interval=3, coverage=0.5, seed=5)
    assert [found.config_after(steps)[KEY].get("seed") for steps in (0, 2, 3, 5, 6)] == [5, 5, 6, 6, 7]
    grown = schedule(GROWING, redraw_interval=5)
    assert [(grown.phase_after(s), grown.draw_after(s)) for s in (3, 4, 5, 6)] == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert (grown.turns, schedule(GROWING).turns) == ([0, 4, 5, 6], [0, 4, 6])


def test_the_first_phase_begins_with_what_the_config_has() -> None:
    found = schedule([{"until_step": 1, "stage": 1}, {}], coverage=0.5)
    found.check_first(1)
    with pytest.raises(ValueError, match=r"schedule\[0\]\.stage: got 1, but zero_optimization.stage is 2"):
        found.check_first(2)


LAST: dict[str, Any] = {"coverage": 1.0}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([], ".schedule: got [], expected a list of phases"),
        ("growing", ".schedule: got 'growing', expected a list of phases"),
        ([{"coverage": 0.5}, LAST], ".schedule[0]: expected either until_step"),
        ([{"until_step": 3, "until": 0.5, "coverage": 0.5}, LAST], ".schedule[0]: expected either until_step"),
        ([{"until_step": 3, "coverage": 0.5}], ".schedule[0].until_step: the last phase lasts until the end"),
        ([{"until_step": 3.5, "coverage": 0.5}, LAST], ".schedule[0].until_step: got 3.5, expected the number of"),
        ([{"until": 1.5, "coverage": 0.5}, LAST], ".schedule[0].until: got 1.5, expected a fraction of all steps"),
        ([{"until_step": 3, "coverage": 0.5, "stage": 3}, LAST], ".schedule[0].stage: got 3, expected one of ZeRO's"),
        ([{"until_step": 3, "coverage": 1.5}, LAST], ".schedule[0].coverage: got 1.5, expected a number above 0"),
        ([{"until_step": 3, "covrage": 0.5}, LAST], ".schedule[0].covrage: unknown key"),
        ([{"until_step": 3, "coverage": 0.5}, LAST | {"train_micro_batch_size_per_gpu": 1}], "_gpu: unknown key"),
        ([{"until_step": 3}, LAST], "schedule[0]: neither coverage nor holders is given"),
        ([{"until_step": 3, "coverage": 0.5, "enabled": False}, LAST], "'enabled' cannot change in a run"),
        ([{"until_step": 3, "coverage": 0.5, "schedule": []}, LAST], "'schedule' cannot change in a run"),
        ([{"until_step": 3, **LAST}, {"until_step": 3, **LAST}, LAST], ".schedule[1]: ends with step 3"),
    ],
)
def test_wrong_schedules(phases: Any, expected: str) -> None:
    assert expected in message(phases)


# ---- a program's number of steps ------------------------------------------------------------------------------------


FRACTIONS = [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]


@pytest.mark.parametrize(
    "block",
    [
        {"schedule": [{"until_step": 5, "coverage": 0.5}, {"coverage": 1.0}]},
        {"schedule": [{"until_step": 5, "coverage": 0.5}, {"coverage": 1.0}], "total_steps": "auto"},
        {"schedule": FRACTIONS, "total_steps": 9},
        {"schedule": FRACTIONS, "enabled": False},
        {"schedule": [{"until": None, "until_step": 5}, {"coverage": 1.0}]},
        {"coverage": 0.5},
        # Mistakes are for the parser.
        {"schedule": "soon"},
        {"schedule": [3, None]},
        [],
        None,
    ],
)
def test_what_is_left_alone(block: Any) -> None:
    config = {KEY: block}
    assert not fill_total_steps(config, 7)
    assert config == {KEY: block}
    assert config[KEY] is block
    assert not fill_total_steps({}, 7)


@pytest.mark.parametrize("given", [{}, {"total_steps": "auto"}, {"total_steps": None}])
def test_fractions_get_their_steps_and_the_users_block_stays(given: dict[str, Any]) -> None:
    block = {"schedule": FRACTIONS} | given
    config = {KEY: block}
    assert fill_total_steps(config, 7)
    assert config == {KEY: {"schedule": FRACTIONS, "total_steps": 7}}
    assert block == {"schedule": FRACTIONS} | given
