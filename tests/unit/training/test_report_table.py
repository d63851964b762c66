"""The table that sets runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdp_deepspeed.__main__ import main
from sdp_deepspeed.training.report_table import load_report, table
from tests.helpers.example_reports import figures, report, write_metrics


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


def test_what_all_ranks_did(tmp_path: Path) -> None:
    text = table([report("ours", scale=2), report("theirs", scale=4)])
    assert cells(text, "all ranks: tokens per second") == ["1000 (2.00x)", "500"]
    assert cells(text, "all ranks: tokens trained") == ["2000 (1.00x)", "2000"]
    assert cells(text, "all ranks: FLOPs") == ["-", "-"]
    assert cells(table([report("ours", scale=2, flops=610)]), "all ranks: FLOPs") == ["610"]


def test_figures_of_phases() -> None:
    """One of 2 steps with 4 MiB of each kind, and one of 6 with 2 MiB, but more gradients."""
    first, second = report("SDP 2/4", scale=4, steps=2), report("dense", scale=2, steps=6)
    second["ranks"][0]["gradients"] = 12 * 2**20
    ours = report("SDP 2/4, then dense", scale=9, phases=[first, second])
    text = table([ours, report("theirs", scale=1)])
    assert cells(text, "weights")[0] == "4.00 MiB (4.00x)"
    assert cells(text, "gradients")[0] == "12.00 MiB (12.00x)"
    assert cells(text, "model state, sum of the three")[0] == "13.00 MiB (4.33x)", "of one rank in one phase"
    assert cells(text, "bytes sent per step")[0] == "2.50 MiB (2.50x)", "(2 x 4 + 6 x 2) / 8"
    assert cells(text, "step time, median")[0] == "250 ms (2.50x)"
    assert cells(text, "all ranks: tokens per second")[0].startswith("800 ")
    assert "SDP 2/4 in 2 steps of 400 ms, dense in 6 steps of 200 ms" in text
    assert "memory is the largest of any phase; traffic and step time are means over all steps" in text
    second["ranks"] = None
    assert cells(table([ours, report("theirs", scale=1)]), "weights")[0] == "-"
    assert "largest of any phase" not in table([report("ours", scale=2), report("theirs", scale=4)])


def test_a_run_that_goes_on_counts_as_far_as_it_has_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path / "mine")
    assert main(["report", str(tmp_path / "mine")]) == 0
    text = capsys.readouterr().out
    assert cells(text, "weights") == ["2.00 MiB"]
    assert cells(text, "step time, median") == ["1000 ms"]
    assert cells(text, "dense validation loss") == ["4.0000"]
    assert cells(text, "all ranks: tokens trained") == ["1200"]
    assert cells(text, "all ranks: FLOPs") == ["600"]
    assert "mine: 2 ranks, 6 steps, step p10 1000 ms, p90 1000 ms; not finished" in text


def test_flops_of_a_run_that_changed_its_coverage(tmp_path: Path) -> None:
    """100 in each of the first four steps, 10 in the others: the second process begins with the fifth."""
    write_metrics(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(figures(6, first_step=5, flops=5)) + "\n")
    assert load_report(tmp_path)["flops"] == 4 * 100 + 2 * 10


def test_a_finished_report_of_an_older_version_is_read(tmp_path: Path) -> None:
    """It has no FLOPs and no phases."""
    older = {key: value for key, value in report("ours", scale=1).items() if key not in ("flops", "phases")}
    (tmp_path / "report.json").write_text(json.dumps(older))
    assert cells(table([load_report(tmp_path)]), "all ranks: FLOPs") == ["-"]


def test_losses_are_drawn_and_equal_methods_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_metrics(tmp_path / name)
        (tmp_path / name / "report.json").write_text(json.dumps(report("ours", scale=1)))
    folders = [str(tmp_path / name) for name in ("one", "two")]
    assert main(["report", *folders, "--plot", str(tmp_path / "new" / "losses.svg")]) == 0
    drawn = (tmp_path / "new" / "losses.svg").read_text()
    assert "<svg" in drawn
    printed = capsys.readouterr().out
    assert all(f"ours ({folder})" in printed for folder in folders)


def test_plots_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path / "mine")
    assert main(["report", str(tmp_path / "mine"), "--plot", str(tmp_path / "losses.doc")]) == 2
    assert "'doc' is not supported" in capsys.readouterr().err
    write_metrics(tmp_path / "none", losses=(None,))
    assert main(["report", str(tmp_path / "none"), "--plot", str(tmp_path / "losses.png")]) == 2
    assert "no run has an evaluation yet" in capsys.readouterr().err


def test_unfinished_and_foreign_reports_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="has not finished, start it again to resume"):
        load_report(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(report("ours", scale=1, version=99)))
    assert main(["report", str(tmp_path)]) == 2
    assert "has version 99, expected 1" in capsys.readouterr().err
    for path in (tmp_path / "absent", tmp_path / "report.json"):
        assert main(["report", str(path)]) == 2
        assert f"RUN: {path} is no folder, expected one that a run's --run-folder named" in capsys.readouterr().err


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
        ("tokens_per_step", None),
        ("flops", "many"),
        ("phases", {}),
        ("phases", [3]),
        ("phases", [{"label": "dense"}]),
        ("phases", [report("dense", scale=1, steps="10")]),
        ("ranks", [dict.fromkeys(("weights", "gradients", "optimizer", "peak", "sent"), 1) | {"flops": "many"}]),
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
