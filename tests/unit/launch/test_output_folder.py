"""The lock of an output folder: held until the process ends, and what is said where it cannot be taken."""

from __future__ import annotations

import errno
import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from output_folder import check_resumable, hold
from tests.helpers.programs import error_of


def test_without_locks_a_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    hold(tmp_path / "run")
    assert "No locks available; nothing prevents a second run in it" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "error: training.output_dir: " in error_of(capsys, lambda: hold(tmp_path / "file"))


def test_a_checkpoint_of_the_other_kind_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, plain = tmp_path / "own", tmp_path / "plain"
    for file in (own / "global_step3/checksums.json", plain / "global_step3/mp_rank_00_model_states.pt"):
        file.parent.mkdir(parents=True)
        file.touch()
    for folder, is_own, advice in ((own, True, "remove sdp=off"), (plain, False, "add sdp=off")):
        check_resumable(str(folder), has_subnetworks=is_own)
        assert advice in error_of(capsys, partial(check_resumable, str(folder), has_subnetworks=not is_own))
