"""Complete or absent: what is there after an error, after a killed process, and with several writers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sdp_deepspeed.atomic_files import (
    added_when_complete,
    complete_or_absent,
    regular,
    remove_abandoned,
    remove_folder,
    staging_path,
    write_text,
)
from sdp_deepspeed.lock_owner import machine


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
    left = abandoned(tmp_path, "out")
    with complete_or_absent(tmp_path / "out") as staging:
        (staging / "file").touch()
        assert not left.exists()
    assert names_in(tmp_path / "out") == ["file"]


def abandoned(folder: Path, name: str, on: str = machine()) -> Path:
    """What a killed process left."""
    left = folder / f".{name}.{on}.0.writing"
    left.mkdir()
    (left / "torn").touch()
    return left


def test_what_is_abandoned_is_removed_and_what_is_not_stays(tmp_path: Path) -> None:
    """A process of this machine has a lock while it lives; of others only age tells."""
    here, there, other = (abandoned(tmp_path, *where) for where in [("data-1",), ("data-2", "far"), ("model",)])
    with complete_or_absent(tmp_path / "data-1", concurrent=True) as alive:
        remove_abandoned(tmp_path, "data-*")
        assert [path.exists() for path in (alive, here, there, other)] == [True, False, True, True]
    for path in (there, there / "torn"):
        os.utime(path, (time.time() - 2 * 24 * 3600,) * 2)
    remove_abandoned(tmp_path, "data-*")
    assert names_in(tmp_path) == [other.name, "data-1"]


def test_two_writers_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    """The second one to end is told; what the first one wrote is whole."""
    out = tmp_path / "out"

    def second() -> None:
        with complete_or_absent(out) as staging:
            (staging / "second").touch()
            with complete_or_absent(out) as other:
                (other / "first").touch()

    with pytest.raises(ValueError, match="was made by another process in the meantime"):
        second()
    assert names_in(out) == ["first"]
    assert names_in(tmp_path) == ["out"]


def added(folder: Path, *names: str) -> None:
    with added_when_complete(folder, last="config", replaces=lambda name: name.startswith("model")) as staging:
        for name in names:
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_text("new")


def test_files_come_to_a_folder_together(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "out"
    added(folder, "config", "model-1", "model-2", "more/file")
    (folder / "theirs").write_text("old")
    (folder / "model").mkdir()  # what is no file is not ours
    added(folder, "config", "model-3", "more/file", "more/other")
    assert names_in(folder) == ["config", "model", "model-3", "more", "theirs"]
    assert names_in(folder / "more") == ["file", "other"]
    assert (folder / "theirs").read_text() == "old"
    assert names_in(folder.parent) == ["out"]


@pytest.mark.parametrize("is_there", [False, True])
def test_an_error_leaves_a_folder_as_it_was(tmp_path: Path, *, is_there: bool) -> None:
    folder = tmp_path / "out"
    if is_there:
        added(folder, "config", "model-1")

    def fail() -> None:
        with added_when_complete(folder, last="config", replaces=lambda _: True) as staging:
            (staging / "config").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert names_in(tmp_path) == (["out"] if is_there else [])
    if is_there:
        assert names_in(folder) == ["config", "model-1"]
        assert (folder / "config").read_text() == "new"


def test_a_process_that_is_killed_in_between_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = tmp_path / "out", []
    added(folder, "config", "model-1", "model-2")
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(names_in(folder))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    added(folder, "config", "model-1", "model-3")
    assert len(seen) == 3
    assert not any("config" in names for names in seen)
    assert {"model-1", "model-3"} <= set(seen[-1])


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
