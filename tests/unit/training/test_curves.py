"""Losses over tokens, FLOPs and time, from records of a run that nobody ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdp_deepspeed.training.curves import curve_of, flops_until, read_records, step_seconds
from tests.helpers.example_reports import figures, phase, write_metrics


def test_a_curve_has_the_dense_losses(tmp_path: Path) -> None:
    """Not those of training; 200 tokens and 2 x 50 FLOPs a step, and one second, also for steps that took 40."""
    write_metrics(tmp_path)
    curve = curve_of("mine", read_records(tmp_path))
    assert (curve.label, curve.losses) == ("mine", (6.0, 5.0, 4.0))
    assert curve.amounts == (0, 600, 1200)
    assert curve.flops == (0, 300, 600)
    assert curve.seconds == (0.0, 3.0, 6.0)


@pytest.mark.parametrize("written", [True, False], ids=["first steps", "older runs"])
def test_each_process_counts_its_own_flops(written: bool) -> None:
    """Three processes: from step 1, 6 and 9. Counted here step by step."""
    firsts, rates = (1, 6, 9), (50, 100, 10)
    records = [
        figures(first + 1, first_step=first if written else None, flops=rate)
        for first, rate in zip(firsts, rates, strict=True)
    ]
    of_step = [2 * rates[sum(first <= step for first in firsts) - 1] for step in range(1, 13)]
    assert [flops_until(records, step) for step in range(13)] == [sum(of_step[:step]) for step in range(13)]


def test_a_process_that_measured_its_only_step() -> None:
    assert flops_until([figures(2, first_step=1), figures(5, first_step=5, flops=7)], 5) == 4 * 100 + 14


def test_each_phase_counts_its_own_flops_also_when_a_process_ended_before_it_had() -> None:
    """Phases from steps 1 and 5. One process made steps 1 to 5, and was interrupted before it measured the second
    phase, whose step 7 the next one measured; with a new draw after step 8. Counted here step by step."""
    records = [phase(0, 0), figures(2, first_step=1, flops=50), phase(4, 1, "dense")]
    records += [figures(7, first_step=6, flops=90), phase(8, 1, "dense", plan_hash="another draw")]
    of_step = [2 * (50 if step <= 4 else 90) for step in range(1, 13)]
    assert [flops_until(records, step) for step in range(13)] == [sum(of_step[:step]) for step in range(13)]
    again = [*records, figures(11, first_step=10, flops=30)]  # a third process, with other settings
    assert flops_until(again, 12) == sum(of_step[:9]) + 3 * 60


def test_flops_of_a_phase_that_was_not_measured_are_not_known() -> None:
    records = [phase(0, 0), figures(2, first_step=1), phase(4, 1, "dense")]
    assert [flops_until(records, step) for step in (3, 4, 5)] == [300, 400, None]


def test_seconds_of_steps_are_those_of_their_phase_and_re_planning_counts(tmp_path: Path) -> None:
    """Six steps, of which 1, 2 and 4, 5 are not timed: the medians of 1 and 3 seconds stand for them."""
    seconds = {1: (40.0, False), 2: (40.0, False), 3: (1.0, True), 4: (40.0, False), 5: (40.0, False), 6: (3.0, True)}
    steps = [{"kind": "train", "step": step, "seconds": s, "timed": timed} for step, (s, timed) in seconds.items()]
    found = step_seconds([phase(0, 0), *steps, phase(3, 1, "dense", seconds=0.25)])
    assert found == {1: 1.0, 2: 1.0, 3: 1.25, 4: 3.0, 5: 3.0, 6: 3.0}


def test_flops_that_a_process_did_not_count() -> None:
    assert flops_until([figures(2), figures(6, flops=None)], 8) is None
    assert flops_until([], 8) is None


def test_what_was_not_measured(tmp_path: Path) -> None:
    write_metrics(tmp_path, flops=None, losses=(6.0, None, 4.0))
    curve = curve_of("mine", read_records(tmp_path))
    assert curve.flops is None
    assert (curve.losses, curve.amounts) == ((6.0, 4.0), (0, 1200)), "a loss that is not finite is left out"
    assert curve_of("none", read_records(tmp_path / "nowhere")).losses == ()


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("train", "seconds", None),
        ("train", "tokens_per_second", "many"),
        ("train", "timed", 1),
        ("train", "seconds", True),
        ("evaluation", "dense_validation_loss", "low"),
        ("figures", "ranks", {}),
        ("figures", "first_step", "one"),
        ("phase", "method", 1),
        ("phase", "coverage", None),
        ("phase", "seconds", "long"),
    ],
)
def test_records_of_another_shape_are_named(tmp_path: Path, kind: str, key: str, value: object) -> None:
    write_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(phase(6, 1)) + "\n")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    index = next(index for index, line in enumerate(lines) if line["kind"] == kind)
    lines[index][key] = value
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:{index + 1}: {key}: missing, or not as a run writes it"):
        read_records(tmp_path)
