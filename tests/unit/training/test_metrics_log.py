"""A run's records: what is kept, what is forgotten, and what is said when a line is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

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


def test_a_log_that_is_cut_anywhere_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # hundreds of times, for nothing
    path = tmp_path / "metrics.jsonl"
    whole = MetricsLog(path, writes=True)
    records: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.5},
        {"step": 2, "ranks": [{"a": {"b": "}"}}]},
        {"step": 2, "name": "\u00fc"},
    ]
    for record in records:
        whole.append(record)
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        log = MetricsLog(path, writes=True)
        log.drop_after(2)
        kept = log.read()
        assert kept == records[: len(kept)]
        assert len(kept) >= content[:cut].count(b"\n")
        log.append(records[0])
        assert log.read() == [*kept, records[0]], cut


@pytest.mark.parametrize("tail", [b"\0" * 100, b"\xff\xfe", b"[" * 100_000, b"[]", b'{"loss": 1}', b"17", b"\r\n"])
def test_what_a_crash_of_the_system_leaves_at_the_end_is_left_out(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + tail)
    log = MetricsLog(path, writes=True)
    log.drop_after(5)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_another_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2 is no record of a run"):
        MetricsLog(path, writes=True).read()


def test_nothing_follows_a_line_that_was_lost(tmp_path: Path) -> None:
    """It may be there in part."""
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    log = MetricsLog(path, writes=True)
    log.append({"step": 1})
    path.unlink()
    log.append({"step": 2})
    assert not path.exists()


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
