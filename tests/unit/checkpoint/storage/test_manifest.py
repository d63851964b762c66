"""What a manifest vouches for: files as they were written."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.checkpoint.storage.manifest import (
    FORMAT,
    hashed_file,
    problem_of,
    read_manifest,
    share,
    verify,
    write_manifest,
)
from sdp_deepspeed.checkpoint.storage.names import COMMON, INDEX, MANIFEST, rank_file, tensors_file


def test_a_full_disk_is_named() -> None:
    message = "cannot write /dev/full: No space left on device"
    with pytest.raises(RuntimeError, match=message), hashed_file(Path("/dev/full"), {}) as file:
        file.write(b"0" * 1000)


@pytest.mark.parametrize("ends", [False, True])
def test_large_files_are_hashed_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """However slowly, and in this thread where no other can begin: the process ends, and a save is not done."""
    data, threads, records = bytes(range(256)) * 2**13, list[threading.Thread](), dict[str, Any]()
    start = threading.Thread.start

    def begin(thread: threading.Thread) -> None:
        if ends:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threads.append(thread)
        run = thread.run
        thread.run = lambda: time.sleep(0.05) or run()  # type: ignore[method-assign, func-returns-value]
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    with hashed_file(tmp_path / "file", records) as file:
        file.write(b"abc")
        file.write(memoryview(data))
        file.write(b"end")
    assert len(threads) == (not ends)
    assert records["file"]["sha256"] == hashlib.sha256(b"abc" + data + b"end").hexdigest()
    assert (tmp_path / "file").read_bytes() == b"abc" + data + b"end"


def test_a_manifest_vouches_for_what_was_written(tmp_path: Path) -> None:
    records: dict[str, Any] = {}
    with hashed_file(tmp_path / "file", records) as file:
        file.write(b"abc")
        file.write(memoryview(b"def"))
    for name in (COMMON, INDEX, rank_file(0), tensors_file(0)):
        with hashed_file(tmp_path / name, records):
            pass
    manifest = {"format": FORMAT, "ranks": 1, "files": records}
    write_manifest(tmp_path, manifest)
    assert verify(tmp_path) == (manifest, [])
    assert records["file"]["bytes"] == 6
    for content, words in ((b"abcde", "has 5 bytes and was written with 6"), (b"abcdeg", "does not have its hash")):
        (tmp_path / "file").write_bytes(content)
        assert words in str(problem_of(tmp_path, "file", records["file"]))
    (tmp_path / "file").unlink()
    assert verify(tmp_path) == (manifest, [f"{tmp_path / 'file'} is missing"])


@pytest.mark.parametrize("left_out", [COMMON, INDEX, rank_file(1), tensors_file(0)])
def test_a_manifest_without_a_file_is_not_complete(tmp_path: Path, left_out: str) -> None:
    names = {COMMON, INDEX, *map(rank_file, range(2)), *map(tensors_file, range(2))}
    records: dict[str, Any] = {}
    for name in names - {left_out}:
        with hashed_file(tmp_path / name, records):
            pass
    write_manifest(tmp_path, {"format": FORMAT, "ranks": 2, "files": records})
    assert verify(tmp_path)[1] == [f"{tmp_path / left_out} is not in its manifest.json"]


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"ranks": 1}, "does not name the files of all ranks"),
        ({"ranks": 1, "files": {}}, "does not name the files of all ranks"),
        ({"ranks": 10**12, "files": {"a": 1}}, "does not name the files of all ranks"),
        ({"ranks": "2", "files": {"a": 1}}, "does not name the files of all ranks"),
        ({"ranks": 1, "files": {"a": 1}}, "vouches for 'a'"),
        ({"ranks": 1, "files": {"../a": {"bytes": 0, "sha256": ""}}}, "vouches for '../a'"),
        ({"ranks": 1, "files": {"/etc/passwd": {"bytes": 0, "sha256": ""}}}, "vouches for '/etc/passwd'"),
    ],
)
def test_a_manifest_of_another_shape_is_no_proof(tmp_path: Path, manifest: dict[str, Any], words: str) -> None:
    write_manifest(tmp_path, {"format": FORMAT} | manifest)
    assert words in " ".join(verify(tmp_path)[1])


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"format": FORMAT + 1, "files": {}})
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
        read_manifest(tmp_path)


def test_ranks_share_the_files() -> None:
    names = ["c", "a", "b", "e", "d"]
    shares = [share(names, rank, 2) for rank in range(2)]
    assert shares == [["a", "c", "e"], ["b", "d"]]


def test_a_link_to_a_device_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    """It would be read without end."""
    (tmp_path / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"manifest.json is damaged: .*it is a device, a pipe or a folder"):
        read_manifest(tmp_path)
    (tmp_path / "file").symlink_to("/dev/zero")
    assert "expected a file" in str(problem_of(tmp_path, "file", {"bytes": 0, "sha256": ""}))
