"""One rank's part in the meetings of its team. `_take_part` has the order of a meeting."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from sdp_deepspeed.checkpoint.hf_folder import tied_names
from sdp_deepspeed.config import LocalSteps
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.messages import KEY, announce, listed
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.teams.attendance import NO_STATE, START, STEP, Attendance, Member, Refused, Wait, attend
from sdp_deepspeed.teams.dense_modules import DenseModules
from sdp_deepspeed.teams.exchange import Exchange
from sdp_deepspeed.teams.meeting_point import REMIND, RETRY, MeetingPoint
from sdp_deepspeed.teams.outer_step import Result, TeamState
from sdp_deepspeed.teams.outside_changes import OutsideChanges
from sdp_deepspeed.teams.ranks import TeamRanks
from sdp_deepspeed.teams.shares import buckets, num_elements
from sdp_deepspeed.teams.weights import TorchHost, Weights

logger = logging.getLogger("sdp_deepspeed")

_VOID, _UNKNOWN, _COUNTS = range(3)  # what a rank knows of a meeting; of several ranks the largest is right


class Participant:
    """What a rank knows of its team, and how it meets the others.

    Args:
        plan: of one worker for each team, in coordinates of the dense model.
        mask: applied.
        agreed: further facts that must be equal on all teams, by name.
        communication_dtype: of the differences that are sent.

    Attributes:
        number: of this team, from 0.
        present: numbers of the teams at the last meeting.
        joined: numbers of those that took anchors over at it.
        seconds_waiting, seconds_exchanging: in all meetings so far, the first part of them for other teams.
        bytes_sent: by this rank in all meetings so far.
    """

    def __init__(
        self,
        plan: Plan,
        mask: Mask,
        settings: LocalSteps,
        host: TorchHost,
        model: DenseModules,
        ranks: TeamRanks,
        *,
        address: str,
        agreed: Mapping[str, Any],
        communication_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.number, self.plan = mask.rank, plan
        self._mask, self._settings, self._ranks, self._address = mask, settings, ranks, address
        self._agreed = {"ranks": ranks.size, **agreed}
        self._dtype = communication_dtype
        self._tied = tied_names(mask.model)
        self._weights, self._model = Weights(host, mask, ranks), model
        self._changes = OutsideChanges(lambda: [] if self.is_dense else host.local())
        size = num_elements(self._weights.shares)
        self._state = TeamState(torch.zeros(size), torch.zeros(size if settings.outer_momentum else 0))
        self._pending: Result | None = None  # of a meeting that may count
        self._point: MeetingPoint | None = None
        self._has_left = self._is_back = False  # the second: since the start, no call has been made
        self._attempts = 0
        self.present: tuple[int, ...] = ()
        self.joined: tuple[int, ...] = ()
        self.seconds_waiting = self.seconds_exchanging = 0.0
        self.bytes_sent = 0

    @property
    def version(self) -> int:
        """Number of meetings that counted; 0 before the first, -1 before `start`."""
        return self._state.version

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run so far. A team that comes back goes on with this one, in its data and its learning
        rate."""
        return self._state.num_steps

    @property
    def has_started(self) -> bool:
        return self._point is not None

    @property
    def is_dense(self) -> bool:
        """Whether the module is the dense model now."""
        return self._model.is_shown

    def leave(self) -> None:
        """Leave the run, after the last call: the others wait no more for this team."""
        if self._point is not None:
            self._point.leave()
        self._has_left = True
        self._ranks.close()

    def _take_part(self, call: str) -> Result:
        """Meet until a meeting counts, and take its result over."""
        deltas = self._checked_deltas() if call == STEP else None
        limit, begin = self._settings.wait_timeout, time.monotonic()
        reminded = failing_since = 0.0  # seconds since the begin
        while True:
            attendance, waited = self._attend(call, begin)
            if isinstance(attendance, Wait):
                if waited > limit and not attendance.can_begin:
                    self._give_up(f"{attendance.reason}; gave up after {waited:.0f} s")
                if waited > reminded + REMIND:
                    reminded = waited
                    self._log(f"{attendance.reason}, since {waited:.0f} s", is_warning=True)
                time.sleep(RETRY)
                continue
            if self._settle(attendance):
                deltas = None
            result = self._result(attendance, deltas)
            error, num_bytes = self._try(attendance, result)
            if error is None:
                self._take_over(result)
                self._log_meeting(call, attendance, waited, time.monotonic() - begin - waited, num_bytes)
                if not attendance.only_helps(call):
                    self._is_back = call == START
                    return result
                deltas, begin, reminded, failing_since = None, time.monotonic(), 0.0, 0.0
                continue
            failing_since = failing_since or waited
            if waited - failing_since > limit:
                self._give_up(f"no meeting has counted for {waited - failing_since:.0f} s: {error}")
            self._log(f"a meeting did not count and is repeated: {error}", is_warning=True)
            time.sleep(RETRY)

    def _attend(self, call: str, begin: float) -> tuple[Attendance | Wait, float]:
        """Ask who is here.

        Returns:
            The decision, and seconds since the begin; the same on all ranks of the team.
        """
        assert self._point is not None
        answer: list[Member] | str = ""
        waited = time.monotonic() - begin
        self._attempts += 1
        if self._ranks.rank == 0:
            mine = Member(
                identity=self._point.identity,
                team=self.number,
                version=self.version,
                last=self._state.last,
                pending="" if self._pending is None else self._pending.attendance.identity,
                call=call,
                num_steps=self.num_steps,
                steps_since=self._state.steps_since,
                attempts=self._attempts,
                group=self._point.group_name,
                store=self._point.store,
                may_begin=waited > self._settings.wait_timeout,
                is_back=self._is_back,
                agreed=self._agreed,
            )
            try:
                others = listed((team for team in self.present if team != self.number), limit=16)
                whom = f"teams {others} of the last meeting" if others else "teams that train"
                answer = self._point.gather(mine, whom, self._settings.wait_timeout)
            except TimeoutError as error:
                answer = str(error)
            waited = time.monotonic() - begin
        self._point.identity, answer, waited = self._ranks.broadcast((self._point.identity, answer, waited))
        if isinstance(answer, str):
            self._give_up(answer)
        try:
            return attend(answer, self._point.identity, self.plan), waited
        except Refused:
            self.leave()
            raise

    def _give_up(self, reason: str) -> NoReturn:
        self.leave()
        raise RuntimeError(f"team {self.number}: {reason}")

    def _try(self, attendance: Attendance, result: Result) -> tuple[str | None, int]:
        """Exchange, and agree with all teams that all have finished.

        Returns:
            None if the meeting counts, or the error; number of bytes sent.
        """
        assert self._point is not None
        point, problem = self._point, None
        exchange: Exchange | None = None
        try:
            group = point.connect(attendance, self._ranks.rank)
            stores_all = self.plan.regime == "backward"
            exchange = Exchange(group, attendance, self.number, stores_all, self._dtype)
            for bucket in buckets(self._weights.shares):
                result.exchange(exchange, bucket)
        except RuntimeError as error:
            problem = str(error)
        if not self._ranks.all(problem is None):
            point.disconnect()
            return _describe(problem or "it failed on another rank of this team"), 0
        assert exchange is not None
        try:
            exchange.confirm()
        except RuntimeError as error:
            problem = str(error)
        outcome = _VOID
        try:
            outcome = _COUNTS if point.decide(attendance.identity, problem is None) else _VOID
        except RuntimeError as error:
            outcome, problem = _UNKNOWN, problem or str(error)
        outcome = self._ranks.largest(outcome)
        if outcome == _COUNTS:
            try:
                exchange.confirm()  # nobody goes on, and ends with the store, before all know the decision
            except RuntimeError:
                point.disconnect()
            return None, exchange.num_bytes
        if outcome == _UNKNOWN:
            self._pending = result
        point.disconnect()
        return _describe(problem or "another team has not finished"), 0

    def _settle(self, attendance: Attendance) -> bool:
        """Take over the result of an earlier meeting if another team knows that it counts."""
        pending = self._pending
        if pending is None or pending.attendance.identity not in {member.last for member in attendance.members}:
            return False
        self._take_over(pending)
        return True

    def _result(self, attendance: Attendance, deltas: torch.Tensor | None) -> Result:
        """What a meeting will compute. Collective in the team."""
        if not attendance.averages or self.number not in attendance.current:
            deltas = None
        elif deltas is None:
            deltas = self._deltas()
        return Result(self._state, attendance, self.number, self._weights.shares, self._settings, deltas)

    def _take_over(self, result: Result) -> None:
        """Replace the team's state and weights by the result of a meeting that counts. Collective in the team."""
        state, attendance = self._state, result.attendance
        if state.version != NO_STATE and result.copies:
            self._log(
                f"missed meetings after version {state.version}: takes over version {attendance.next_version}, drops "
                f"{state.steps_since} steps",
                is_warning=True,
            )
        before = state.anchors
        result.replace_state()
        are_new = attendance.averages or not self._ranks.all(torch.equal(state.anchors, before))
        del before
        if are_new:
            self._weights.write(state.anchors)
            self._changes.note()
        self._pending = None

    def _checked_deltas(self) -> torch.Tensor:
        deltas = self._deltas()
        advice = "the other teams go on, start it again to take over their weights"
        self._check_finite([deltas], f"weights are not finite at step {self.num_steps}; {advice}")
        if not self._ranks.all(not self._changes.found()):
            self._give_up(
                "weights were changed by other than the optimizer after start() or step(), of which the other teams do "
                "not know; change them before start(), or between the optimizer's step and step()"
            )
        return deltas

    def _check_finite(self, vectors: Iterable[torch.Tensor], problem: str) -> None:
        if not self._ranks.all(all(bool(vector.isfinite().all()) for vector in vectors)):
            self._give_up(problem)

    def _deltas(self) -> torch.Tensor:
        """Anchors minus weights of this rank's shares."""
        weights = torch.empty_like(self._state.anchors)
        self._weights.read(weights)
        return torch.sub(self._state.anchors, weights, out=weights)

    def _check_started(self, call: str) -> None:
        if self._point is None:
            raise RuntimeError(f"{call}: call team.start() first, after the model is wrapped and loaded")
        if self._has_left:
            raise RuntimeError(f"{call}: team {self.number} has left the run; call leave() after the last call")
        if self.is_dense:
            raise RuntimeError(f"{call} inside dense(): leave the context first, on all teams")

    def _log(self, text: str, *, is_warning: bool = False) -> None:
        if self._ranks.rank == 0:
            logger.log(logging.WARNING if is_warning else logging.INFO, "team %d: %s", self.number, text)

    def _log_meeting(self, call: str, attendance: Attendance, waited: float, exchanged: float, num_bytes: int) -> None:
        joined = f", new: {listed(attendance.joined, limit=16)}" if attendance.joined else ""
        text = (
            f"{call}, version {self.version}, with teams {listed(attendance.teams, limit=16)}{joined}; waited "
            f"{waited:.1f} s, sent {num_bytes:,} bytes in {exchanged:.1f} s"
        )
        self._log(text)
        if (attendance.joined or attendance.teams != self.present) and self._ranks.rank == 0:
            announce(f"{KEY}: team {self.number}: {text}", logger)
        self.present, self.joined = attendance.teams, attendance.joined
        self.seconds_waiting += waited
        self.seconds_exchanging += exchanged
        self.bytes_sent += num_bytes


def _describe(error: str) -> str:
    """The first sentence of an error, without places in sources."""
    return re.sub(r"^\[\S*\] ", "", error.splitlines()[0]).split(". ")[0]
