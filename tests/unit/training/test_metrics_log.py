"""A run's records: what is kept, what is forgotten, and what is said when a line is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.training.metrics_log import MetricsLog
from sdp_deepspeed.training.user_errors import RunFolderError


def test_what_lies_after_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", writes=True)
    assert log.read() == []
    for step in range(5):
        log.append({"step": step, "loss": float("nan") if step == 1 else 0.5})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a crash in the middle of a line
    log.drop_after(2)
    assert log.read() == [{"step": 0, "loss": 0.5}, {"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]


def test_a_lost_line_waits_until_the_ranks_have_agreed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    log = MetricsLog(path, writes=True)
    log.raise_problem()
    log.append({"step": 1})
    assert log.failed
    with pytest.raises(RunFolderError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        log.raise_problem()


def test_ranks_that_do_not_write_may_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path, writes=True).append({"step": 1})
    other = MetricsLog(path, writes=False)
    other.append({"step": 2})
    other.drop_after(0)
    assert other.read() == [{"step": 1}]
