"""Documents from every kind of source, and what is said when they cannot be read."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from sdp_deepspeed.data import DataConfig
from sdp_deepspeed.data.corpus import StandardLibrary, open_corpus
from sdp_deepspeed.data.rows import column_of


def _documents(**settings: Any) -> list[str]:
    return list(open_corpus(DataConfig(**settings)).documents())


def _json_lines(path: Path, rows: Iterable[Any]) -> None:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def fineweb(tmp_path: Path) -> Path:
    """Two shards of parquet with FineWeb's columns, and one without rows."""
    folder = tmp_path / "fineweb"
    (folder / ".cache").mkdir(parents=True)
    (folder / ".cache" / "left_over.parquet").write_bytes(b"not data")
    for shard, texts in enumerate((["first\r\npage", "second é", "  "], [], ["third", "fourth"])):
        columns = {"text": texts, "id": texts, "dump": texts, "url": texts, "language": texts}
        table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
        scores = pa.array([0.5] * len(texts), pa.float64())
        pq.write_table(table.append_column("language_score", scores), folder / f"00{shard}_00000.parquet")
    return folder


def test_standard_library_is_sorted_without_tests_and_repeatable(tmp_path: Path) -> None:
    files = {
        "b.py": b"b = 1\n",
        "a/z.py": b"z = 1\n",
        "a/b.txt": b"no python",
        "test/t.py": b"t = 1\n",
        "a/tests/t.py": b"t = 1\n",
        "site-packages/s.py": b"s = 1\n",
        "latin.py": b"# \xe9\xff",
        "huge.py": b"x = 1\n" * 100_000,
        "blank.py": b"\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = StandardLibrary(tmp_path)
    assert list(corpus.documents()) == ["z = 1\n", "b = 1\n"]
    before = corpus.fingerprint()
    assert StandardLibrary(tmp_path).fingerprint() == before
    (tmp_path / "b.py").write_bytes(b"b = 2\n")
    assert corpus.fingerprint() != before


def test_standard_library_of_this_interpreter_and_cap() -> None:
    longer = _documents(max_bytes=1_000_000)
    sizes = [len(text.encode()) for text in longer]
    assert 500_000 < sum(sizes) <= 1_000_000
    # The cap ends before the first document that would exceed it, also by one byte.
    assert _documents(max_bytes=sum(sizes[:10])) == longer[:10]
    assert _documents(max_bytes=sum(sizes[:10]) - 1) == longer[:9]


def test_parquet_by_folder_glob_and_file(fineweb: Path) -> None:
    expected = ["first\r\npage", "second é", "third", "fourth"]
    assert _documents(source="files", path=str(fineweb)) == expected
    assert _documents(source="files", path=str(fineweb / "*.parquet")) == expected
    assert _documents(source="files", path=str(fineweb / "002_00000.parquet"), text_column="url") == expected[2:]


@pytest.mark.parametrize("streaming", [True, False])
def test_hub_reads_the_same_schema(fineweb: Path, streaming: bool) -> None:
    # A folder of parquet stands for a data set's repository: `datasets` loads both by the same call.
    (fineweb / "001_00000.parquet").unlink()
    texts = _documents(source="hub", path=str(fineweb), streaming=streaming)
    assert texts == ["first\r\npage", "second é", "third", "fourth"]


def test_hub_settings_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls: list[Any] = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return datasets.Dataset.from_dict({"body": ["a", "b"], "other": [1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = {"source": "hub", "path": "owner/name", "subset": "sample-10BT", "split": "test", "revision": "v1"}
    assert _documents(**config, text_column="body", streaming=False) == ["a", "b"]
    assert calls == [(("owner/name", "sample-10BT"), {"split": "test", "revision": "v1", "streaming": False})]


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


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "a"}\n{oops\n', "JSON parse error"),
        ("a.jsonl", b'{"text": 5}\n', "column 'text' holds int, expected text"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', "no column 'text', it has ['body', 'id']: set text_column"),
        ("a.parquet", b"xx", "cannot be read as text documents"),
        ("a.txt", b"\xff\xfe\x80abc", "can't decode byte 0xff"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.") as error:
        _documents(source="files", path=str(tmp_path))
    assert str(tmp_path / name) in str(error.value)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


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


def test_a_network_failure_is_not_called_a_mistake() -> None:
    def unreachable() -> Any:
        raise ConnectionError("hub is away")

    with pytest.raises(ConnectionError, match="hub is away"):
        list(column_of(unreachable, "text", where="owner/name"))


def test_fingerprint_follows_files_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")

    def fingerprint(**settings: Any) -> str:
        return open_corpus(DataConfig(source="files", path=str(path), **settings)).fingerprint()

    before = fingerprint()
    assert fingerprint() == before
    assert len({before, fingerprint(max_bytes=10), fingerprint(text_documents="line")}) == 3
    os.utime(path, ns=(1, 1))
    assert fingerprint() != before
