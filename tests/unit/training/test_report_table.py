"""The table that sets runs side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.training.report_table import REPORT_VERSION, load_report, main, table

MIB = 2**20


def report(label: str, *, scale: int, **changes: Any) -> dict[str, Any]:
    """A report whose second rank is the larger one: `scale` MiB of each kind there."""
    kinds = ("weights", "gradients", "optimizer", "peak", "sent")
    return {
        "version": REPORT_VERSION,
        "label": label,
        "num_ranks": 2,
        "steps": 10,
        "dense_validation_loss": 1.25,
        "step_seconds": {"median": 0.1 * scale, "p10": 0.05, "p90": 0.5, "num_steps": 8},
        "ranks": [dict.fromkeys(kinds, MIB // 2), dict.fromkeys(kinds, scale * MIB)],
        "hardware": "a CPU",
    } | changes


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
    assert main([str(tmp_path)]) == 2
    assert "has version 99, expected 1" in capsys.readouterr().err


def test_it_runs_without_torch(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(report("ours", scale=1)))
    lines = (
        "import sys",
        "sys.modules['torch'] = None",
        "from sdp_deepspeed.training.report_table import main",
        "sys.exit(main(sys.argv[1:]))",
    )
    result = subprocess.run(
        [sys.executable, "-c", "; ".join(lines), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "1.00 MiB" in result.stdout
