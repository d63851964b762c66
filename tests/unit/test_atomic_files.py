"""Complete or absent: what is there after an error, after a killed process, and with several writers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdp_deepspeed.atomic_files import complete_or_absent, remove_folder, staging_path, write_text


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_to_sync(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    staging_path(path).write_text("of a killed process")
    for text in ("first", "second"):
        write_text(path, text)
        assert path.read_text() == text
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_file_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, concurrent: bool
) -> None:
    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", fail_to_sync)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "file", "new", concurrent=concurrent)
    assert (tmp_path / "file").read_text() == "old"
    assert names_in(tmp_path) == ["file"]


def test_others_may_read_what_they_are_permitted_to(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "private", "")
        write_text(tmp_path / "public", "", permissions=0o644)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "public")] == [0o600, 0o644]


def test_a_folder_appears_with_all_that_is_in_it(tmp_path: Path) -> None:
    out = tmp_path / "above" / "out"
    with complete_or_absent(out) as staging:
        (staging / "inner").mkdir()
        (staging / "inner" / "file").write_text("x")
        assert not out.exists()
    assert (out / "inner" / "file").read_text() == "x"
    assert names_in(out.parent) == ["out"]


@pytest.mark.parametrize("concurrent", [False, True])
def test_nothing_is_left_of_a_folder_that_fails(tmp_path: Path, *, concurrent: bool) -> None:
    (tmp_path / "out").mkdir()

    def interrupted() -> None:
        with complete_or_absent(tmp_path / "out", concurrent=concurrent) as staging:
            (staging / "file").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names_in(tmp_path) == ["out"]
    assert names_in(tmp_path / "out") == []


def test_what_a_killed_process_left_of_a_folder_is_no_part_of_it(tmp_path: Path) -> None:
    left = staging_path(tmp_path / "out")
    left.mkdir()
    (left / "torn").touch()
    with complete_or_absent(tmp_path / "out") as staging:
        (staging / "file").touch()
    assert names_in(tmp_path / "out") == ["file"]


def test_a_folder_with_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="is there already"), complete_or_absent(out):
            raise AssertionError("nothing is begun")


def test_of_concurrent_folders_the_first_one_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with complete_or_absent(out, concurrent=True) as second:
        (second / "second").touch()
        with complete_or_absent(out, concurrent=True) as first:
            (first / "first").touch()
    assert names_in(out) == ["first"]
    assert names_in(tmp_path) == ["out"]


def test_a_folder_is_removed_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    for _ in range(2):
        remove_folder(tmp_path / "out")
    assert names_in(tmp_path) == []
