"""Phases in the records of runs that nobody ran."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.training.phase_records import label_of, mean_coverage, mean_over_steps, phase_reports, spans
from tests.helpers.example_reports import figures, phase


def steps(first: int, last: int, *, seconds: float = 1.0, untimed: int = 0) -> list[dict[str, Any]]:
    """Train records, the first `untimed` of which take long."""
    return [
        {"kind": "train", "step": step, "seconds": seconds if step >= first + untimed else 40.0}
        | {"timed": step >= first + untimed}
        for step in range(first, last + 1)
    ]


SCHEDULE = [
    *[phase(0, 0), *steps(1, 4, untimed=2), figures(2, first_step=1)],
    *[phase(4, 1, "dense", seconds=0.5), *steps(5, 12, seconds=3.0, untimed=2), figures(6, first_step=5, flops=90)],
]


def test_a_run_without_a_schedule_is_one_span_and_has_no_phases() -> None:
    records = [*steps(1, 4), figures(2)]
    (span,) = spans(records)
    assert all(map(span.has, records))
    assert phase_reports(records) is None
    assert label_of(records, 4) is None


def test_each_phase_has_its_own_steps_figures_and_times() -> None:
    first, second = phase_reports(SCHEDULE) or []
    assert (first["label"], first["steps"], first["step_seconds"]["median"]) == ("SDP 1/2", 4, 1.0)
    assert (second["label"], second["steps"], second["step_seconds"]["median"]) == ("dense", 8, 3.0)
    assert [part["ranks"][0]["flops"] for part in (first, second)] == [50, 90]
    assert mean_coverage([first, second]) == pytest.approx((4 * 0.5 + 8 * 1.0) / 12)


def test_new_draws_belong_to_their_phase() -> None:
    draws = [phase(step, 0, plan_hash=str(step)) for step in (1, 2, 3)]
    assert [part["steps"] for part in phase_reports([SCHEDULE[0], *draws, *SCHEDULE[1:]]) or []] == [4, 8]


def test_a_phase_in_which_no_step_was_made_is_left_out() -> None:
    records = [*SCHEDULE, phase(12, 2, "SDP 2/2")]
    assert len(phase_reports(records) or []) == 2
    assert label_of(records, 12) == "SDP 1/2, then dense + ZeRO-1"


def test_a_phase_that_was_not_measured_yet() -> None:
    unmeasured = [record for record in SCHEDULE if record.get("first_step") != 5]
    assert [part["ranks"] is None for part in phase_reports(unmeasured) or []] == [False, True]


def test_a_schedule_that_began_in_the_middle_of_a_run() -> None:
    parts = phase_reports([*steps(1, 3), *[r | {"step": r["step"] + 3} for r in SCHEDULE]]) or []
    assert [(part["label"], part["steps"]) for part in parts] == [
        ("before the schedule", 3),
        ("SDP 1/2", 4),
        ("dense", 8),
    ]
    assert mean_coverage(parts) is None


@pytest.mark.parametrize(
    ("methods", "stages", "label"),
    [
        (["SDP 2/4", "SDP 3/4", "dense"], [1, 1, 1], "SDP 2/4, then SDP 3/4, then dense + ZeRO-1"),
        (["SDP 2/4", "dense"], [1, 2], "SDP 2/4 + ZeRO-1, then dense + ZeRO-2"),
        (["SDP 2/4", "SDP 2/4"], [1, 1], "SDP 2/4 + ZeRO-1"),  # with other batches
        (["a", "b", "c", "d", "e", "f"], [0] * 6, "a, then 4 others, then f + ZeRO-0"),
    ],
)
def test_labels(methods: list[str], stages: list[int], label: str) -> None:
    numbered = enumerate(zip(methods, stages, strict=True))
    records = [phase(5 * index, index, method, stage=stage) for index, (method, stage) in numbered]
    assert label_of(records, 100) == label


def test_means_weigh_phases_by_their_steps() -> None:
    parts = [{"steps": 1}, {"steps": 3}]
    assert mean_over_steps(parts, [10.0, 2.0]) == 4.0
    assert mean_over_steps(parts, [10.0, None]) is None
    assert mean_over_steps([{"steps": 0}], [10.0]) is None
