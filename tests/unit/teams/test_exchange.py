"""What teams average, by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import pytest
import torch

from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.teams.attendance import Attendance, attend
from sdp_deepspeed.teams.exchange import Exchange
from sdp_deepspeed.teams.shares import Range
from sdp_deepspeed.units import Piece, Unit
from tests.unit.teams.test_attendance import member

HOLDERS = (0, 1, 2)
PLAN = Plan("forward", "block", 3, 0, (Unit("a", (Piece("a", None, 0, 1),)),), (HOLDERS,), HOLDERS)
DELTAS = {0: torch.arange(5.0), 1: torch.arange(5.0) ** 2, 2: torch.full((5,), 60.0)}


@dataclass
class Thread:
    """Its all-to-alls with the others, in place of ranks r of the teams."""

    index: int
    sources: dict[int, list[torch.Tensor]]
    barrier: Barrier

    def alltoall_base(
        self, target: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int], _: Any
    ) -> Any:
        self.sources[self.index] = list(source.split(sent))
        self.barrier.wait()
        for index, part in enumerate(target.split(received)):
            part.copy_(self.sources[index][self.index])
        self.barrier.wait()
        return self

    def wait(self) -> None:
        pass


def meeting_of(versions: dict[int, int]) -> Attendance:
    attendance = attend([member(team, version) for team, version in versions.items()], "t0", PLAN)
    assert isinstance(attendance, Attendance)
    return attendance


@pytest.mark.parametrize(
    ("versions", "current"),
    [({0: 5, 1: 5, 2: 5}, (0, 1, 2)), ({0: 5, 1: 5}, (0, 1)), ({0: 5, 1: 5, 2: 4}, (0, 1)), ({0: 5}, (0,))],
    ids=["all", "one is absent", "one has missed a meeting", "alone"],
)
def test_the_mean_is_over_the_holders_that_are_present_and_current(
    versions: dict[int, int], current: tuple[int, ...]
) -> None:
    attendance, barrier = meeting_of(versions), Barrier(len(versions), timeout=60)
    sources: dict[int, list[torch.Tensor]] = {}
    bucket = [Range(HOLDERS, 5, 0, 0, is_buffer=False)]

    def average(index: int, team: int) -> torch.Tensor:
        means = torch.zeros(5)
        group: Any = Thread(index, sources, barrier)
        exchange = Exchange(group, attendance, team, stores_all=False, dtype=torch.float32)
        exchange.average(bucket, DELTAS[team] if team in current else None, means)
        return means

    with ThreadPoolExecutor() as pool:
        found = dict(zip(versions, pool.map(average, range(len(versions)), versions), strict=True))
    expected = torch.stack([DELTAS[team] for team in current]).sum(0) / len(current)
    for team, means in found.items():
        assert torch.equal(means, expected if team in current else torch.zeros(5)), team
