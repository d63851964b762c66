"""Who takes part in a meeting, and who has what: computed by every rank of every team from the same facts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.plan import Plan

START = "start"  # the call that takes part in a meeting of any kind
STEP = "step"  # the call after which weights are averaged
SAVE = "save_pretrained"  # the call after which one team has the dense model; after others each team has
NO_STATE = -1  # version of a team that has no anchors yet

Teams = tuple[int, ...]  # ascending


@dataclass(frozen=True)
class Member:
    """Facts of a team that has come to a meeting.

    Args:
        identity: unique for each start of a team.
        version: meetings that counted, `NO_STATE` before the first.
        last: identity of the meeting that its anchors are of.
        pending: identity of a meeting that it has finished without knowing whether it counts, or "".
        call: name of the call that all teams make together, or `START`.
        steps_since: those since the meeting that its anchors are of.
        group: identity of the process group that it has from the last meeting, or "".
        store: "host:port" of the store in its rank 0.
        may_begin: whether it has waited long enough for teams that are missing at the start of the run.
        is_back: whether this is its first call since it started. It cannot know whether the others, at the meeting at
            which it came, fetch the dense model before their next step.
        agreed: what must be equal on all teams, by name.
    """

    identity: str
    team: int
    version: int
    last: str
    pending: str
    call: str
    num_steps: int
    steps_since: int
    attempts: int
    group: str
    store: str
    may_begin: bool
    is_back: bool
    agreed: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Member:
        """Facts of a team, which may have another version of this package."""
        return cls(**{field.name: data.get(field.name, {} if field.name == "agreed" else "") for field in fields(cls)})


class Refused(RuntimeError):
    """This team cannot take part."""


@dataclass(frozen=True)
class Wait:
    """The meeting cannot take place with the teams that are here.

    Args:
        reason: what is missing, for the log and the error at the time limit.
        can_begin: whether it may take place without the missing teams after the time limit.
    """

    reason: str
    can_begin: bool = False


@dataclass(frozen=True)
class Attendance:
    """A meeting that can take place.

    Args:
        members: those who take part, by team.
        call: of all members but those that start.
        version: before the meeting; `NO_STATE` if no team has a state.
        last: identity of the meeting that the newest anchors are of.
        current: teams that have the anchors of this version.
        sources: for each set of holders, the team whose anchors are copied to those that lack them.
    """

    members: tuple[Member, ...]
    call: str
    version: int
    last: str
    current: Teams
    sources: Mapping[Teams, int]

    @property
    def teams(self) -> Teams:
        return tuple(member.team for member in self.members)

    @property
    def joined(self) -> Teams:
        """Teams that take anchors over, as they have none or older ones."""
        return tuple(team for team in self.teams if team not in self.current or self.version == NO_STATE)

    @property
    def averages(self) -> bool:
        """Whether weights are averaged."""
        return self.call == STEP

    @property
    def receivers(self) -> Teams:
        """Teams that fetch the dense model: those that make the call, or the first of them."""
        if self.call in (START, STEP):
            return ()
        callers = tuple(member.team for member in self.members if member.call == self.call)
        return callers[:1] if self.call == SAVE else callers

    @property
    def next_steps(self) -> tuple[int, int]:
        """Steps of the run, and since its last meeting, at which teams go on that start or take anchors over: those of
        the others."""
        current = [
            member for member in self.members if member.team in self.current and not self.only_helps(member.call)
        ]
        since = 0 if self.averages else max(member.steps_since for member in current)
        return max(member.num_steps for member in current), since

    def only_helps(self, call: str) -> bool:
        """Whether a team with this call takes part in that of others, and then repeats its own."""
        return self.call != START and call not in (self.call, START)

    def follows(self, team: int) -> bool:
        """Whether a team goes on at the step of the others."""
        return team in self.joined or any(member.call == START for member in self.members if member.team == team)

    @property
    def next_version(self) -> int:
        return self.version + 1 if self.averages else max(self.version, 0)

    @property
    def next_last(self) -> str:
        """Identity of the meeting that anchors are of after this one."""
        is_new = self.averages or self.version == NO_STATE or not set(self.sources.values()) <= set(self.current)
        return self.identity if is_new else self.last

    @property
    def identity(self) -> str:
        """The same on all ranks, different for each attempt."""
        attempts = [(member.identity, member.attempts) for member in self.members]
        return hashlib.sha256(repr(attempts).encode()).hexdigest()[:16]

    def copies(self, team: int, holders: Teams) -> bool:
        """Whether a team takes over the anchors of a unit with these holders, if it stores them."""
        return team in self.joined and team != self.sources[holders]


def attend(members: Sequence[Member], me: str, plan: Plan) -> Attendance | Wait:
    """Decide whether and how the teams that are here meet.

    Args:
        members: all that have come.
        me: identity of this team.
        plan: with one worker for each team.

    Raises:
        Refused: this team cannot take part, or teams make different calls.
    """
    members = _settled(members)
    mine = next(member for member in members if member.identity == me)
    if (wait := _refuse_difference(mine, members, plan.num_subnetworks)) is not None:
        return wait
    same = [member for member in members if member.agreed == mine.agreed]
    first: dict[int, Member] = {}  # of each number, a team that trains before one that starts
    for member in sorted(same, key=lambda member: (member.team, member.call == START, member.identity)):
        first.setdefault(member.team, member)
    if first[mine.team] is not mine:
        return Wait(f"another process is team {mine.team} already; end it, or set another SDP_TEAM")
    present = tuple(first.values())
    calls = {
        member.call: member for member in reversed(present) if member.call != START and not _is_early(member, present)
    }
    if len(calls) > 1:
        text = " and ".join(f"team {member.team} calls {call}" for call, member in sorted(calls.items()))
        raise Refused(
            f"all teams must make the same calls: {text}; give all teams the same number of steps, or leave()"
        )
    return _with_holders(present, next(iter(calls), START), plan)


def _is_early(member: Member, present: Sequence[Member]) -> bool:
    """Whether a team that has come back has trained on, while others fetch the dense model before that."""
    fetching = [other.num_steps for other in present if other.call not in (START, STEP)]
    return member.is_back and member.call == STEP and any(steps < member.num_steps for steps in fetching)


def _settled(members: Sequence[Member]) -> list[Member]:
    """With the versions of those that had a meeting pending of which another team knows that it counts."""
    counted = {member.last: member.version for member in members}
    settled = []
    for member in members:
        if member.pending and member.pending in counted:
            member = replace(member, version=counted[member.pending], last=member.pending, pending="")
        settled.append(member)
    return settled


def _refuse_difference(mine: Member, members: Sequence[Member], num_teams: int) -> Wait | None:
    """Refuse this team if it starts and differs from more others than are like it, or from teams that train. Those
    ignore it."""
    if mine.call != START:
        return None
    alike = [[other for other in members if other.agreed == member.agreed] for member in members]
    different = [group for group in alike if group[0].agreed != mine.agreed]
    if not different:
        return None
    same = sum(member.agreed == mine.agreed for member in members)
    others = max(different, key=lambda group: (any(other.call != START for other in group), len(group)))
    other = min(others, key=lambda member: member.team)
    names = [name for name, value in mine.agreed.items() if other.agreed.get(name) != value]
    text = " and ".join(f"{name} {mine.agreed[name]}, team {other.team} has {other.agreed.get(name)}" for name in names)
    is_everyone = len({member.team for member in members}) == num_teams
    train = any(other.call != START for other in others)
    if train or same < len(others) or (same == len(others) and is_everyone):
        raise Refused(f"team {mine.team} has {text}; start all teams with the same program and config")
    return Wait(f"team {mine.team} has {text}") if same == len(others) else None


def _with_holders(present: Sequence[Member], call: str, plan: Plan) -> Attendance | Wait:
    """The meeting of these teams, if they have the anchors of every unit."""
    versions = {member.team: member.version for member in present}
    newest = max(versions.values())
    # Teams that went separate ways have the same version of other anchors: the most, or the first, are current.
    lines = Counter(member.last for member in present if member.version == newest)
    line = max(lines, key=lambda last: lines[last])
    current = tuple(member.team for member in present if (member.version, member.last) == (newest, line))
    everyone = tuple(range(plan.num_subnetworks))
    sources: dict[Teams, int] = {}
    for holders in dict.fromkeys((everyone, *plan.holders)):
        able = [team for team in holders if team in current]
        if not able and plan.regime == "backward" and not versions.keys().isdisjoint(holders):
            able = [*current]  # all teams store all units
        if not able and (call == START or versions.keys() >= {*holders}):  # nobody has newer ones: the newest of these
            able = [team for team in holders if versions.get(team, NO_STATE) > NO_STATE]
            able.sort(key=lambda team: -versions[team])
        if able:
            sources[holders] = able[0]
    lost = [(unit, holders) for unit, holders in zip(plan.units, plan.holders, strict=True) if holders not in sources]
    absent = [team for team in everyone if team not in versions]
    if lost:
        units = listed(unit.name for unit, _ in lost)
        needed = sorted({team for _, holders in lost for team in holders}.difference(versions))
        state = f" with version {newest}" if newest > NO_STATE else ""
        remedy = f"waiting for one of teams {listed(needed)}" if needed else "start its teams from their checkpoints"
        return Wait(f"no holder of {units}{state} is here; {remedy}")
    if call == START and absent and not any(member.may_begin for member in present):
        return Wait(f"waiting for teams {listed(absent)}", can_begin=True)
    return Attendance(tuple(present), call, newest, line, current, sources)
