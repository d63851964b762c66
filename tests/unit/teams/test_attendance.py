"""Who takes part in a meeting, and who has what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.teams.attendance import NO_STATE, SAVE, START, STEP, Attendance, Member, Refused, Wait, attend
from sdp_deepspeed.units import Piece, Unit

AGREED = {"plan": "abc", "ranks": 2}
# a is held by teams 0 and 1, b by 1 and 2.
UNITS = tuple(Unit(name, (Piece(name, None, 0, 1),)) for name in ("a", "b"))
PLAN = Plan("forward", "block", 3, 0, UNITS, ((0, 1), (1, 2)), (0, 1, 2))
EVERYONE = (0, 1, 2)


def member(team: int, version: int = 5, call: str = STEP, **facts: Any) -> Member:
    last = "" if version == NO_STATE else f"meeting {version}"
    first = Member(f"t{team}", team, version, last, "", call, 0, 0, 1, "", "host:1", False, False, AGREED)
    return replace(first, **facts)


def met(members: list[Member]) -> Attendance:
    """The meeting, which is the same for all of them."""
    decisions = [attend(members, other.identity, PLAN) for other in members]
    assert all(decision == decisions[0] for decision in decisions)
    assert isinstance(decisions[0], Attendance)
    return decisions[0]


def waits(members: list[Member], me: str = "t0", plan: Plan = PLAN) -> Wait:
    decision = attend(members, me, plan)
    assert isinstance(decision, Wait)
    return decision


def test_without_a_current_holder_of_some_unit_all_wait() -> None:
    for members in ([member(0)], [member(0), member(1, version=4)], [member(0), member(1, NO_STATE, START)]):
        decision = waits(members)
        assert "b with version 5" in decision.reason
        absent = [str(team) for team in (1, 2) if team not in [other.team for other in members]]
        assert f"waiting for one of teams {', '.join(absent)}" in decision.reason
        assert not decision.can_begin


def test_if_all_holders_have_come_back_from_older_checkpoints_the_newest_of_those_counts() -> None:
    others = [member(0), member(1, 3, START), member(2, 4, START)]
    meeting = met(others)
    assert meeting.current == (0,)
    assert meeting.sources == {EVERYONE: 0, (0, 1): 0, (1, 2): 2}
    assert meeting.copies(1, (1, 2))
    assert not meeting.copies(2, (1, 2))
    assert meeting.next_version == 6
    decision = waits([member(0), member(1, NO_STATE, START), member(2, NO_STATE, START)])
    assert "b with version 5 is here; start its teams from their checkpoints" in decision.reason


def test_in_the_backward_regime_other_teams_have_what_holders_have_lost() -> None:
    plan = replace(PLAN, regime="backward")
    for versions in ((3, 4), (NO_STATE, NO_STATE)):
        members = [member(0), *(member(team, version, START) for team, version in enumerate(versions, 1))]
        meeting = attend(members, "t0", plan)
        assert isinstance(meeting, Attendance)
        assert set(meeting.sources.values()) == {0}
        assert all(meeting.copies(team, (1, 2)) for team in (1, 2))
    waits(members[:1], plan=plan)  # nobody would train the unit


def test_who_comes_back_takes_over_from_the_first_current_holder() -> None:
    meeting = met([member(0, NO_STATE, START), member(1), member(2, version=3)])
    assert meeting.current == (1,)
    assert meeting.joined == (0, 2)
    assert meeting.call == STEP
    assert meeting.copies(0, (0, 1))
    assert meeting.copies(2, EVERYONE)
    assert not meeting.copies(1, (0, 1))


def test_who_starts_during_another_call_goes_on_at_the_step_of_the_others() -> None:
    others = [member(team, call="dense", num_steps=53, steps_since=3) for team in (0, 1)]
    for started in (member(2, NO_STATE, START), member(2, 5, START, num_steps=51, steps_since=1)):
        meeting = met([*others, started])
        assert [meeting.follows(team) for team in EVERYONE] == [False, False, True]
        assert meeting.next_steps == (53, 3)
        assert meeting.receivers == (0, 1)
    meeting = met([member(0, NO_STATE, START), member(1, call=SAVE), member(2, call=SAVE)])
    assert meeting.receivers == (1,), "a team that starts does not write"


def test_the_first_meeting_after_a_start_is_of_all_teams() -> None:
    assert "teams 0, 2" in waits([member(1, 7, START)], "t1").reason, "they may have newer anchors"
    first = [member(team, NO_STATE, START) for team in range(3)]
    meeting = met(first)
    assert meeting.next_version == 0
    assert not meeting.copies(0, (0, 1))
    assert meeting.copies(1, (0, 1)), "all have the same weights afterwards"
    decision = waits(first[:2])
    assert decision.can_begin
    assert "teams 2" in decision.reason
    begun = met([first[0], replace(first[1], may_begin=True)])
    assert begun.teams == (0, 1)


def test_restored_teams_agree_on_the_newest() -> None:
    meeting = met([member(0, 7, START), member(1, 7, START), member(2, 6, START)])
    assert not meeting.averages
    assert meeting.next_version == 7
    assert meeting.next_last == "meeting 7"
    assert meeting.joined == (2,)


def test_restored_teams_take_the_newest_that_is_left_of_a_unit() -> None:
    meeting = met([member(0, 7, START), member(2, 6, START, may_begin=True)])
    assert meeting.sources[1, 2] == 2
    assert meeting.sources[0, 1] == 0
    assert meeting.copies(2, EVERYONE)
    assert not meeting.copies(2, (1, 2))
    assert meeting.next_last == meeting.identity


def test_teams_that_went_separate_ways_are_not_both_current() -> None:
    meeting = met([member(0, last="x"), member(1, last="y"), member(2, last="y")])
    assert meeting.current == (1, 2)
    assert meeting.joined == (0,)


def test_a_meeting_that_another_team_counts_is_counted() -> None:
    """Team 1 has lost the decision of a meeting that team 2 knows."""
    meeting = met([member(0, 4, pending="meeting 5"), member(1, 4, pending="another"), member(2)])
    assert meeting.current == (0, 2)
    assert meeting.members[0].last == "meeting 5"
    nobody_knows = met([member(0, 4, pending="meeting 5"), member(1, 4, pending="meeting 5")])
    assert nobody_knows.next_version == 5


def test_different_calls_are_refused_by_name() -> None:
    for me in ("t0", "t1", "t2"):
        with pytest.raises(Refused, match="team 0 calls save_pretrained and team 1 calls step"):
            attend([member(0, call="save_pretrained"), member(1), member(2, NO_STATE, START)], me, PLAN)


def test_who_came_back_helps_others_that_fetch_the_dense_model_before_its_step() -> None:
    """Also one that starts now goes on at the step of the others."""
    others = [member(0, call="dense", num_steps=10), member(2, NO_STATE, START)]
    ahead = member(1, num_steps=12, steps_since=2, is_back=True)
    meeting = met([*others, ahead])
    assert (meeting.call, meeting.receivers, meeting.next_steps) == ("dense", (0,), (10, 0))
    assert [other.team for other in meeting.members if meeting.only_helps(other.call)] == [1]
    assert not meeting.follows(1)
    for early in (replace(ahead, num_steps=10), replace(ahead, is_back=False)):
        with pytest.raises(Refused, match="team 0 calls dense and team 1 calls step"):
            attend([*others, early], "t0", PLAN)


def test_a_team_with_another_plan_is_refused_and_the_others_go_on() -> None:
    other = member(2, NO_STATE, START, agreed={"plan": "abc", "ranks": 1})
    with pytest.raises(Refused, match="team 2 has ranks 1, team 0 has 2"):
        attend([member(0), member(1), other], "t2", PLAN)
    for call, version in ((STEP, 5), (START, NO_STATE)):
        majority = [member(0, version, call), member(1, version, call, may_begin=True), other]
        decision = attend(majority, "t0", PLAN)
        assert isinstance(decision, Attendance)
        assert decision.teams == (0, 1)


def test_of_as_many_others_all_are_refused_when_all_are_here() -> None:
    other = member(1, NO_STATE, START, agreed={"plan": "xyz", "ranks": 2})
    mine = member(0, NO_STATE, START)
    waits([mine, other])  # the third decides
    two = Plan("forward", "block", 2, 0, UNITS, ((0, 1), (0, 1)), (0, 1))
    for me in ("t0", "t1"):
        with pytest.raises(Refused, match="has plan"):
            attend([mine, other], me, two)


def test_a_team_that_is_there_already_waits() -> None:
    second = member(0, NO_STATE, START, identity="second")
    assert "another process is team 0" in waits([member(0), second, member(1)], "second").reason
    decision = attend([member(0), second, member(1)], "t1", PLAN)
    assert isinstance(decision, Attendance)
    assert decision.members[0].identity == "t0"


def test_facts_of_another_version_of_the_package_can_be_read() -> None:
    facts = member(2, NO_STATE, START).to_json()
    del facts["pending"]
    other = Member.from_json({**facts, "color": "red", "agreed": {**AGREED, "package": "0.0.9"}})
    assert attend([member(0), member(1), other], "t0", PLAN).teams == (0, 1)  # type: ignore[union-attr]
