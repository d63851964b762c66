"""The table that sets runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.training.report_table import load_report, table
from tests.helpers.example_reports import report


def cells(text: str, title: str) -> list[str]:
    """The two cells of the row with `title`."""
    line = next(line for line in text.splitlines() if line.startswith(title))
    return [cell.strip() for cell in line[len(title) :].split("  ") if cell.strip()]


def test_figures_are_those_of_the_largest_rank_set_against_the_last_run() -> None:
    text = table([report("ours", scale=2), report("theirs", scale=4)])
    assert cells(text, "weights") == ["2.00 MiB (0.50x)", "4.00 MiB"]
    assert cells(text, "model state, sum of the three") == ["6.00 MiB (0.50x)", "12.00 MiB"]
    assert cells(text, "step time, median") == ["200 ms (0.50x)", "400 ms"]
    assert cells(text, "dense validation loss") == ["1.2500", "1.2500"]
    assert "ours: 2 ranks, 10 steps, step p10 50 ms, p90 500 ms; a CPU" in text


def test_what_was_not_measured_is_a_dash() -> None:
    text = table([report("ours", scale=2, dense_validation_loss=None, step_seconds=None), report("theirs", scale=4)])
    assert cells(text, "step time, median") == ["-", "400 ms"]
    assert cells(text, "dense validation loss") == ["-", "1.2500"]


def test_figures_that_were_not_measured_are_dashes() -> None:
    text = table([report("ours", scale=2, ranks=None), report("theirs", scale=4)])
    for title in ("weights", "model state, sum of the three", "peak of live tensors", "bytes sent per step"):
        assert cells(text, title)[0] == "-", title
    assert "a CPU; memory and traffic were not measured" in text
    assert cells(table([report("ours", scale=2), report("theirs", scale=4, ranks=None)]), "weights") == [
        "2.00 MiB",
        "-",
    ]


def test_unfinished_and_foreign_reports_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="has not finished, start it again to resume"):
        load_report(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(report("ours", scale=1, version=99)))
    assert main(["report", str(tmp_path)]) == 2
    assert "has version 99, expected 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("label", None),
        ("steps", "10"),
        ("step_seconds", {"median": 1}),
        ("step_seconds", 3),
        ("ranks", [{"weights": 1}]),
        ("ranks", {"0": {}}),
        ("dense_validation_loss", "low"),
    ],
)
def test_reports_of_another_shape_are_refused(tmp_path: Path, key: str, value: object) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report("ours", scale=1) | {key: value}))
    with pytest.raises(ValueError, match=rf"report\.json: {key}: missing, or not as a run writes it"):
        load_report(tmp_path)


@pytest.mark.parametrize("key", ["label", "ranks", "step_seconds", "dense_validation_loss"])
def test_reports_that_lack_something_are_refused(tmp_path: Path, key: str) -> None:
    (tmp_path / "report.json").write_text(json.dumps({k: v for k, v in report("ours", scale=1).items() if k != key}))
    with pytest.raises(ValueError, match=rf"report\.json: {key}: missing"):
        load_report(tmp_path)
