"""Files are complete or absent, also after an error and a killed process; and what is no file is not read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sdp_deepspeed.atomic_files import regular, write_text


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_to_sync(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    (tmp_path / ".file.writing").write_text("of a killed process")
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


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    else:
        path = Path("/dev/zero")
    with pytest.raises(OSError, match="expected a file") as caught:
        regular(path)
    assert caught.value.filename == str(path)


def test_a_file_and_a_link_to_one_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    assert regular(tmp_path / "link") == tmp_path / "link"
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "lost")
