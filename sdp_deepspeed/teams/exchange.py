"""What rank r of a team exchanges with ranks r of the other teams in a meeting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.teams.attendance import Attendance, Teams
from sdp_deepspeed.teams.shares import Range, Share, buckets, part


@dataclass
class Exchange:
    """All-to-alls of one meeting.

    Args:
        group: ranks r of the teams, in the order of `attendance.teams`.
        stores_all: whether all teams store all units (backward regime).
        dtype: of differences that are sent; sums are fp32.
    """

    group: Any
    attendance: Attendance
    me: int
    stores_all: bool
    dtype: torch.dtype
    num_bytes: int = field(default=0, init=False)

    def average(self, bucket: Sequence[Range], deltas: torch.Tensor | None, means: torch.Tensor) -> None:
        """Average the differences of a bucket over the current holders, which each sum one part.

        Args:
            deltas: differences of this rank's share from the anchors; None if this team is not current.
            means: filled with the means of all that this team stores, if it is current.
        """
        teams = self.attendance.teams
        current = self.attendance.current
        senders = {r.holders: tuple(team for team in r.holders if team in current) for r in bucket}
        outgoing: list[list[torch.Tensor]] = [[] for _ in teams]
        incoming: list[list[int]] = [[] for _ in teams]
        summed = [r for r in bucket if self.me in senders[r.holders]]
        for r in summed:
            assert deltas is not None
            for index, team in enumerate(senders[r.holders]):
                start, length = part(r.length, index, len(senders[r.holders]))
                outgoing[teams.index(team)].append(r.of(deltas)[start : start + length].to(self.dtype))
                incoming[teams.index(team)].append(self._part_of(r, senders[r.holders], self.me)[1])
        received = self._all_to_all(outgoing, incoming, self.dtype)
        parts = []
        for r in summed:  # in the order of teams, so that the sum does not depend on who takes it
            values = [received[teams.index(team)].pop(0).float() for team in senders[r.holders]]
            parts.append((sum(values[1:], values[0]) / len(values)).to(self.dtype))

        outgoing = [[] for _ in teams]
        incoming = [[] for _ in teams]
        for r, mean in zip(summed, parts, strict=True):
            for index, team in enumerate(teams):
                if team in current and self.stores(team, r.holders):
                    outgoing[index].append(mean)
        needed = [r for r in bucket if self.me in current and self.stores(self.me, r.holders)]
        for r in needed:
            for team in senders[r.holders]:
                incoming[teams.index(team)].append(self._part_of(r, senders[r.holders], team)[1])
        received = self._all_to_all(outgoing, incoming, self.dtype)
        for r in needed:
            for team in senders[r.holders]:
                start, length = self._part_of(r, senders[r.holders], team)
                r.of(means)[start : start + length] = received[teams.index(team)].pop(0)

    def copy(self, bucket: Sequence[Range], values: Callable[[Range], torch.Tensor], target: torch.Tensor) -> None:
        """Copy vectors from the source of each range to the teams that store it and take it over.

        Args:
            values: new values of a range at its source, fp32.
            target: filled with what this team takes over.
        """
        wanted = [
            [r for r in bucket if self.stores(team, r.holders) and self.attendance.copies(team, r.holders)]
            for team in self.attendance.teams
        ]
        for r, received in self.send(wanted, values):
            r.of(target).copy_(received)

    def send(
        self, wanted: Sequence[Sequence[Range]], values: Callable[[Range], torch.Tensor]
    ) -> list[tuple[Range, torch.Tensor]]:
        """Send ranges from their sources to the teams that want them.

        Args:
            wanted: ranges of a bucket that each team wants, in its order.
            values: values of a range at its source, fp32.

        Returns:
            The ranges that this team wants, with their values.
        """
        if not any(wanted):
            return []
        teams, sources = self.attendance.teams, self.attendance.sources
        outgoing = [[values(r) for r in of_team if sources[r.holders] == self.me] for of_team in wanted]
        mine = wanted[teams.index(self.me)]
        incoming: list[list[int]] = [[] for _ in teams]
        for r in mine:
            incoming[teams.index(sources[r.holders])].append(r.length)
        received = self._all_to_all(outgoing, incoming, torch.float32)
        return [(r, received[teams.index(sources[r.holders])].pop(0)) for r in mine]

    def confirm(self) -> None:
        """Wait until all teams have finished; RuntimeError if one has not."""
        outputs = [torch.empty(1, dtype=torch.uint8) for _ in self.attendance.teams]
        self.group.allgather([outputs], [torch.ones(1, dtype=torch.uint8)]).wait()

    def _part_of(self, r: Range, senders: Teams, team: int) -> tuple[int, int]:
        return part(r.length, senders.index(team), len(senders))

    def stores(self, team: int, holders: Teams) -> bool:
        """Whether a team stores a unit with these holders."""
        return self.stores_all or team in holders

    def _all_to_all(
        self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[list[torch.Tensor]]:
        """Send tensors to each team.

        Args:
            incoming: numbers of elements of the tensors that come from each team.

        Returns:
            The tensors that came from each team.
        """
        sent = [sum(tensor.numel() for tensor in of_team) * dtype.itemsize for of_team in outgoing]
        counts = [sum(of_team) * dtype.itemsize for of_team in incoming]
        flat = [tensor for of_team in outgoing for tensor in of_team]
        source = torch.cat(flat).view(torch.uint8) if flat else torch.empty(0, dtype=torch.uint8)
        target = torch.empty(sum(counts), dtype=torch.uint8)
        self.group.alltoall_base(target, source, counts, sent, dist.distributed_c10d.AllToAllOptions()).wait()
        self.num_bytes += sum(sent) - sent[self.attendance.teams.index(self.me)]
        received = target.split(counts)
        return [list(of_team.view(dtype).split(list(n))) for of_team, n in zip(received, incoming, strict=True)]


def bytes_per_meeting(shares: Sequence[Share], me: int, plan: Plan, dtype: torch.dtype) -> int:
    """Bytes that a rank sends when all teams meet and nobody copies anchors.

    Args:
        shares: of this rank.
    """
    count = 0
    for r in (r for bucket in buckets(shares) for r in bucket if me in r.holders):
        _, mine = part(r.length, r.holders.index(me), len(r.holders))
        receivers = plan.num_subnetworks if plan.regime == "backward" else len(r.holders)
        count += r.length - mine + mine * (receivers - 1)
    return count * dtype.itemsize
