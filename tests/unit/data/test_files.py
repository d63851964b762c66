"""Local files: which are read, what a document of each kind is, and what is said of those that cannot be."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from sdp_deepspeed.data import DataConfig
from sdp_deepspeed.data.corpus import open_corpus
from sdp_deepspeed.data.parts import documents_of


def _documents(**settings: Any) -> list[str]:
    return list(documents_of(open_corpus(DataConfig(**settings)).parts()))


def _json_lines(path: Path, rows: Iterable[Any]) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


LINES = "".join(json.dumps({"text": f"{number * 7919 % 1000003} words"}) + "\n" for number in range(2000)).encode()


def damaged_parquet(place: float) -> bytes:
    """Thirty bytes of its pages are others, at this share of the file's length."""
    rows = pa.table({"text": [f"{number * 7919 % 1000003} words " * 50 for number in range(500)]})
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="snappy", use_dictionary=False)
    content = sink.getvalue().to_pybytes()
    start = max(20, int(len(content) * place))
    return content[:start] + bytes(byte ^ 255 for byte in content[start : start + 30]) + content[start + 30 :]


def test_json_lines_also_compressed_and_ragged(tmp_path: Path) -> None:
    _json_lines(tmp_path / "a.jsonl", [{"text": "one", "m": 1}, {"text": None}, {"m": {"a": 2}}, {"text": "two\n"}])
    _json_lines(tmp_path / "b.jsonl.gz", [{"text": "three"}])
    (tmp_path / "c.jsonl").touch()
    assert _documents(source="files", path=str(tmp_path)) == ["one", "two\n", "three"]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [
        (None, ["one\ntwo\n\nthree\n", "four\n"]),
        ("file", ["one\ntwo\n\nthree\n", "four\n"]),
        ("paragraph", ["one\ntwo", "three\n", "four\n"]),
        ("line", ["one", "two", "three", "four"]),
    ],
)
def test_text_documents(tmp_path: Path, unit: Any, expected: list[str]) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    (tmp_path / "b [1].txt").write_text("four\n")  # a name that a glob would read otherwise
    assert _documents(source="files", path=str(tmp_path), text_documents=unit) == expected


def test_paths_that_mean_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.csv").write_text("a")
    for path, said in {
        "absent": "no file found",
        "*.parquet": "no file found",
        "a.csv": "cannot tell the kind of file",
        ".": "files of several kinds",
    }.items():
        with pytest.raises(ValueError, match=said):
            open_corpus(DataConfig(source="files", path=str(tmp_path / path)))
    with pytest.raises(ValueError, match=r"text_column has no effect on 'a\.txt'"):
        open_corpus(DataConfig(source="files", path=str(tmp_path / "a.txt"), text_column="x"))
    with pytest.raises(ValueError, match=r"text_documents has no effect on 'a\.jsonl'"):
        open_corpus(DataConfig(source="files", path=str(tmp_path / "a.jsonl"), text_documents="line"))


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text would be missing without a word. Who runs as root may read all."""
    scan = os.scandir
    for name in ("a.txt", "closed/b.txt", ".hidden/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert _documents(source="files", path=str(tmp_path)) == ["a.txt", "closed/b.txt"]

    def refuse(path: Any) -> Any:
        if Path(path).name in ("closed", ".hidden"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=rf"the folder {tmp_path}/closed cannot be read \(Permission denied\)"):
        _documents(source="files", path=str(tmp_path))


def test_fingerprint_follows_files_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")

    def fingerprint(**settings: Any) -> str:
        return open_corpus(DataConfig(source="files", path=str(path), **settings)).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    assert fingerprint(text_documents="line") != before
    os.utime(path, ns=(1, 1))
    assert fingerprint() != before


def test_parquet_by_folder_glob_and_file(fineweb: Path) -> None:
    expected = ["first\r\npage", "second é", "third", "fourth"]
    assert _documents(source="files", path=str(fineweb)) == expected
    assert _documents(source="files", path=str(fineweb / "*.parquet")) == expected
    assert _documents(source="files", path=str(fineweb / "002_00000.parquet"), text_column="url") == expected[2:]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{oops\n', "JSON parse error"),
        ("a.jsonl", b'{"text": 5}\n', "column 'text' holds int, expected text"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', "no column 'text', it has ['body', 'id']: set text_column"),
        ("a.parquet", b"xx", "cannot be read as text documents"),
        (
            "a.parquet",
            b"",
            "cannot be read as text documents",
        ),  # one without rows has bytes
        ("a.txt", b"\xff\xfe\x80abc", "can't decode byte 0xff"),
        ("a.jsonl.gz", gzip.compress(LINES)[:200], "Compressed file ended before"),
        ("a.jsonl.gz", gzip.compress(LINES)[:200] + bytes(100), "cannot be read as text documents"),
        ("a.jsonl.gz", b"hello", "Not a gzipped file"),
        ("a.jsonl.bz2", bz2.compress(LINES)[:200], "Compressed file ended before"),
        ("a.jsonl.bz2", b"hello", "Invalid data stream"),
        ("a.jsonl.xz", lzma.compress(LINES)[:200], "Compressed file ended before"),
        ("a.jsonl.xz", b"hello", "not supported by decoder"),
        ("a.parquet", damaged_parquet(0.5), "Corrupt snappy compressed data"),
        ("a.parquet", damaged_parquet(0.0), "Couldn't deserialize thrift"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.") as error:
        _documents(source="files", path=str(tmp_path))
    assert str(tmp_path / name) in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
