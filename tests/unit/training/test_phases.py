"""A run keeps up with its engine's plan: a pretended engine says when that changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.schedule import Phase
from sdp_deepspeed.training.metrics_log import of_kind
from sdp_deepspeed.training.phases import Phases
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.user_errors import RunFolderError
from sdp_deepspeed.units import Piece, Unit

NUM_STEPS = 20


def plan(*holders: tuple[int, ...]) -> Plan:
    units = tuple(Unit(f"u{i}", (Piece(f"w{i}", None, 0, 4),)) for i in range(len(holders)))
    counts = {len(held) for held in holders}
    return Plan("forward", "block", 2, counts.pop() if len(counts) == 1 else None, 0, units, holders, (0, 1))


ONE_DRAW, ANOTHER, WHOLE = plan((0,), (1,)), plan((1,), (0,)), plan((0, 1), (0, 1))
# After so many steps: index of the phase, its plan, micro-batch.
SCHEDULE = {0: (0, ONE_DRAW, 4), 3: (0, ANOTHER, 4), 6: (1, WHOLE, 2), 9: (2, WHOLE, 1)}
ENDS = (6, 9, None)


@dataclass
class Engine:
    """Changes its plan as `SCHEDULE` says."""

    step: int = 0
    schedule: Any = field(default_factory=lambda: SimpleNamespace(phases=[Phase(1, end, {}) for end in ENDS]))
    last_replan: Any = field(default_factory=lambda: SimpleNamespace(seconds=0.25))

    def _now(self) -> tuple[int, Plan, int]:
        return SCHEDULE[max(first for first in SCHEDULE if first <= self.step)]

    @property
    def phase(self) -> int:
        return self._now()[0]

    @property
    def plan(self) -> Plan:
        return self._now()[1]

    @property
    def coverage(self) -> float:
        return self.plan.coverage

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._now()[2]

    def zero_optimization_stage(self) -> int:
        return 1


class Process:
    """One that trains from a step on."""

    def __init__(self, path: Path, step: int = 0, **engine: Any) -> None:
        self.folder = RunFolder(path, writes=True)
        self.folder.create()
        self.engine, self.batches = Engine(step, **engine), SimpleNamespace(micro_batch=None)
        batches: Any = self.batches
        self.phases = Phases(self.engine, batches, self.folder, OneRank())
        self.said = [self.phases.follow(step, NUM_STEPS)]
        self.untimed: set[int] = set()

    def train(self, until: int) -> Process:
        """Up to this step."""
        for step in range(self.engine.step + 1, until + 1):
            self.untimed |= {self.phases.first_step, self.phases.measured} & {step}
            self.engine.step = step
            self.said.append(self.phases.follow(step, NUM_STEPS))
        return self

    def recorded(self) -> list[tuple[int, int, str]]:
        records = of_kind(self.folder.metrics.read(), "phase")
        return [(record["step"], record["phase"], record["plan_hash"]) for record in records]


RECORDS = [(0, 0, ONE_DRAW.hash), (3, 0, ANOTHER.hash), (6, 1, WHOLE.hash), (9, 2, WHOLE.hash)]


def test_phases_are_told_recorded_and_measured_once(tmp_path: Path) -> None:
    """The second step of each phase is measured, also where a draw lies between."""
    process = Process(tmp_path).train(NUM_STEPS)
    assert [text for text in process.said if text is not None] == [
        "step 6: phase 2 of 3, dense + ZeRO-1, micro-batches of 2 (re-planned in 0.25 s)",
        "step 9: phase 3 of 3, dense + ZeRO-1, micro-batches of 1 (re-planned in 0.25 s)",
    ]
    assert process.recorded() == RECORDS
    assert [record["seconds"] for record in process.folder.metrics.read()] == [0.0, 0.25, 0.25, 0.25]
    assert process.untimed == {1, 2, 7, 8, 10, 11}
    assert process.phases.replan_seconds == 0.0


@pytest.mark.parametrize("step", [1, 3, 5, 6, 8, 9, 15])
def test_a_process_that_goes_on_does_as_the_one_before(tmp_path: Path, step: int) -> None:
    Process(tmp_path).train(step)
    again = Process(tmp_path, step)
    assert again.said == [None], "the introduction says where it is"
    assert Plan.load(tmp_path / "plan.json") == again.engine.plan
    assert again.batches.micro_batch == again.engine.train_micro_batch_size_per_gpu()
    assert (again.phases.first_step, again.phases.measured) == (
        step + 1,
        step + 2 if step != 5 and step != 8 else step + 1,
    )
    assert again.train(NUM_STEPS).recorded() == RECORDS


def test_batches_and_plan_follow_each_step(tmp_path: Path) -> None:
    process = Process(tmp_path)
    for step in range(NUM_STEPS + 1):
        process.train(step)
        assert Plan.load(tmp_path / "plan.json") == process.engine.plan, step
        assert process.batches.micro_batch == process.engine.train_micro_batch_size_per_gpu(), step


def test_another_schedule_is_recorded_where_it_begins(tmp_path: Path) -> None:
    Process(tmp_path).train(4)
    again = Process(tmp_path, 12)  # as if its phase had been another one
    assert again.recorded() == [*RECORDS[:2], (12, 2, WHOLE.hash)]


def test_without_a_schedule_nothing_is_told(tmp_path: Path) -> None:
    process = Process(tmp_path, schedule=None)
    assert process.recorded() == []
    assert process.said == [None]
    assert (process.phases.first_step, process.phases.measured) == (1, 2)
    assert not (tmp_path / "plan.json").exists(), "the session writes it"


def test_a_plan_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    process = Process(tmp_path).train(5)
    (tmp_path / "plan.json").unlink()
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(RunFolderError, match=r"cannot write .*plan\.json: Is a directory"):
        process.train(6)
