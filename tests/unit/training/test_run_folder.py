"""The folder of a run: who may have it, what stays in it, and what is said when it cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.user_errors import RunFolderError
from tests.helpers.other_jobs import other_job


def opened(path: Path) -> RunFolder:
    folder = RunFolder(path, writes=True)
    folder.create()
    return folder


@pytest.mark.parametrize(("path", "reason"), [("file", "there is a file"), ("file/below", "Not a directory")])
def test_a_folder_that_cannot_be_made(tmp_path: Path, path: str, reason: str) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / path, writes=True)
    assert folder.read_json("config.json") is None
    with pytest.raises(ValueError, match=f"--run-folder: cannot make {tmp_path / path}: {reason}.*; choose another"):
        folder.create()


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    (tmp_path / ".report.json.writing").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=r"cannot write .*report\.json: No space left on device; make it possible"):
        folder.write_json("report.json", {"steps": 1})
    assert folder.read_json("report.json") is None


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, writes=True)
    with other_job(tmp_path), pytest.raises(ValueError, match=r"is in use by process 1234 .*python other.py"):
        folder.create()
    folder.create()


def test_only_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    for step in (9, 10, 100):
        (folder.checkpoints / f"step_{step:08d}").mkdir(parents=True)
    folder.prune_checkpoints(2)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step_00000010", "step_00000100"]
    (folder.checkpoints / "latest").write_text("step_00000010")  # resumed from there, and saved again
    folder.prune_checkpoints(1)
    assert (folder.checkpoints / "step_00000010").exists()


def test_ranks_that_do_not_write_leave_no_trace(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", writes=False)
    folder.create()
    folder.write_json("config.json", {})
    folder.metrics.append({"step": 1})
    folder.metrics.drop_after(0)
    assert not (tmp_path / "run").exists()
