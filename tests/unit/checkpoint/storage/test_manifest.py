"""What a manifest vouches for: files as they were written."""

from __future__ import annotations

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


def test_a_full_disk_is_named() -> None:
    message = "cannot write /dev/full: No space left on device"
    with pytest.raises(RuntimeError, match=message), hashed_file(Path("/dev/full"), {}) as file:
        file.write(b"0" * 1000)


def test_a_manifest_vouches_for_what_was_written(tmp_path: Path) -> None:
    records: dict[str, Any] = {}
    with hashed_file(tmp_path / "file", records) as file:
        file.write(b"abc")
        file.write(memoryview(b"def"))
    manifest = {"format": FORMAT, "files": records}
    write_manifest(tmp_path, manifest)
    assert verify(tmp_path) == (manifest, [])
    assert records["file"]["bytes"] == 6
    for content, words in ((b"abcde", "has 5 bytes and was written with 6"), (b"abcdeg", "does not have its hash")):
        (tmp_path / "file").write_bytes(content)
        assert words in str(problem_of(tmp_path, "file", records["file"]))
    (tmp_path / "file").unlink()
    assert verify(tmp_path) == (manifest, [f"{tmp_path / 'file'} is missing"])


def test_a_manifest_of_another_format_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"format": FORMAT + 1, "files": {}})
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
        read_manifest(tmp_path)


def test_ranks_share_the_files() -> None:
    names = ["c", "a", "b", "e", "d"]
    shares = [share(names, rank, 2) for rank in range(2)]
    assert shares == [["a", "c", "e"], ["b", "d"]]
