"""What a team carries from one meeting to the next, and what a meeting makes of it: a step of the outer optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.config import LocalSteps
from sdp_deepspeed.teams.attendance import NO_STATE, Attendance
from sdp_deepspeed.teams.exchange import Exchange
from sdp_deepspeed.teams.shares import Range, Share, buckets


@dataclass
class TeamState:
    """What a rank of a team carries from one meeting to the next.

    Args:
        anchors, momentum: of this rank's shares, fp32 in host memory; the second is empty without an outer momentum.
        version, num_steps: see `Participant`.
        steps_since: optimizer steps since the last meeting.
        last: identity of the meeting that the anchors are of.
    """

    anchors: torch.Tensor
    momentum: torch.Tensor
    version: int = NO_STATE
    num_steps: int = 0
    steps_since: int = 0
    last: str = ""


class Result:
    """What a meeting computes, which replaces the team's state if it counts.

    Args:
        number: of this team.
        deltas: anchors minus weights, of a team whose weights the meeting averages.

    Attributes:
        copies: whether this team takes anchors over from others.
        dense: of a team that fetches the dense model, the elements of this rank's shares that it does not store.
    """

    def __init__(
        self,
        state: TeamState,
        attendance: Attendance,
        number: int,
        shares: Sequence[Share],
        settings: LocalSteps,
        deltas: torch.Tensor | None,
    ) -> None:
        self._state, self.attendance, self._number = state, attendance, number
        self._shares, self._settings, self._deltas = shares, settings, deltas
        self._is_current = number in attendance.current
        self._means = torch.zeros_like(state.anchors) if attendance.averages else None
        holders = {share.holders for share in shares if share.offset is not None}
        self.copies = any(attendance.copies(number, of) for of in holders)
        self._anchors = state.anchors.clone() if self.copies else state.anchors
        self._momentum = state.momentum.clone() if self.copies else state.momentum
        is_receiver = number in attendance.receivers
        self.dense = torch.zeros(sum(share.length for share in shares) if is_receiver else 0)

    def exchange(self, exchange: Exchange, bucket: list[Range]) -> None:
        """Average a bucket, copy it to teams that lack it, and send it to those that fetch the dense model."""
        if self._means is not None:
            exchange.average(bucket, self._deltas, self._means)
        exchange.copy(bucket, lambda r: self._outer_step(r)[0], self._anchors)
        if len(self._state.momentum):
            exchange.copy(bucket, lambda r: self._outer_step(r)[1], self._momentum)
        receivers = self.attendance.receivers
        wanted = [
            [r for r in bucket if team in receivers and not exchange.stores(team, r.holders)]
            for team in self.attendance.teams
        ]
        for r, values in exchange.send(wanted, lambda r: self._outer_step(r)[0]):
            self.dense[r.dense_offset : r.dense_offset + r.length] = values

    def replace_state(self) -> None:
        """Set the team's state to that after the meeting."""
        state, attendance = self._state, self.attendance
        if self._means is not None and self._is_current:
            for r in (r for bucket in buckets(self._shares) for r in bucket if r.offset is not None):
                for vector, values in zip((self._anchors, self._momentum), self._outer_step(r), strict=True):
                    if len(vector):
                        r.of(vector).copy_(values)
        state.anchors, state.momentum = self._anchors, self._momentum
        if attendance.averages or attendance.follows(self._number):
            state.num_steps, state.steps_since = attendance.next_steps
        state.version, state.last = attendance.next_version, attendance.next_last

    def _outer_step(self, r: Range) -> tuple[torch.Tensor, torch.Tensor]:
        """New anchors and momentum of a range at its source, of buffers the means: torch's SGD with Nesterov."""
        state, mu = self._state, self._settings.outer_momentum
        anchors, momentum = r.of(state.anchors), r.of(state.momentum) if mu else state.momentum
        if self._means is None or not self._is_current:
            return anchors, momentum
        step = r.of(self._means)
        if r.is_buffer:
            return anchors - step, momentum
        if mu:
            momentum = momentum * mu + step
            step = step + mu * momentum
        return anchors - self._settings.outer_lr * step, momentum
