"""Row groups: every row is in one part, and a part needs nothing of the others."""

from __future__ import annotations

from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from sdp_deepspeed.data import row_groups
from sdp_deepspeed.data.parts import documents_of
from sdp_deepspeed.data.row_groups import row_groups_of
from tests.helpers.fineweb import write_shard

TEXTS: list[str | None] = ["plain", "naïve café 東京 🙂", "long " * 5000, "", " \n", None, "a\0b", "last"]


@pytest.mark.parametrize("part_bytes", [1, 10**9])
def test_every_row_is_in_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(row_groups, "PART_BYTES", part_bytes)
    shards: list[list[str | None]] = [TEXTS, [], ["of another shard"]]
    files = [write_shard(tmp_path / f"{i}.parquet", texts, rows=2) for i, texts in enumerate(shards)]
    parts = row_groups_of([str(file) for file in files], "text")
    assert len(parts) == {1: 5}.get(part_bytes, 2)
    rows = [text for file in files for text in pq.read_table(file)["text"].to_pylist()]
    assert list(documents_of(parts)) == [text for text in rows if text is not None and text.strip()]
    assert all(part.size > 0 for part in parts)


def test_a_part_is_read_without_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "PART_BYTES", 1)
    file = write_shard(tmp_path / "a.parquet", [f"{i * 7919} words " * 50 for i in range(200)], rows=100)
    start = pq.ParquetFile(file).metadata.row_group(0).column(0).data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + 2000] = bytes(2000)
    file.write_bytes(content)
    first, second = row_groups_of([str(file)], "text")
    assert len(list(second.documents())) == 100
    with pytest.raises(ValueError, match=rf"^{file}: cannot be read as text documents"):
        list(first.documents())


def test_mistakes_are_told_with_the_file(tmp_path: Path) -> None:
    file = write_shard(tmp_path / "a.parquet", ["one"])
    with pytest.raises(ValueError, match=rf"^{file}: no column 'body', it has \['text', 'id', .*: set text_column"):
        row_groups_of([str(file)], "body")
    with pytest.raises(ValueError, match=rf"^{file}: column 'token_count' holds int64, expected text"):
        row_groups_of([str(file)], "token_count")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"^{file}: cannot be read as text documents"):
        row_groups_of([str(file)], "text")


def test_nested_columns_beside_the_text(tmp_path: Path) -> None:
    """Columns of a file are counted by their leaves."""
    table = pa.table({"meta": [{"a": 1, "b": 2}], "text": ["one"]})
    pq.write_table(table, tmp_path / "a.parquet")
    (part,) = row_groups_of([str(tmp_path / "a.parquet")], "text")
    assert list(part.documents()) == ["one"]


def test_addresses_are_read_too_and_a_network_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/mirror/a.parquet", write_shard(tmp_path / "a.parquet", ["one", "two"]).read_bytes())
    (part,) = row_groups_of(["memory:///mirror/a.parquet"], "text")
    assert list(part.documents()) == ["one", "two"]

    def unreachable(*_: object) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr("fsspec.core.url_to_fs", unreachable)
    with pytest.raises(ConnectionError, match=r"memory:///b\.parquet cannot be read from .*no answer.*local mirror"):
        row_groups_of(["memory:///b.parquet"], "text")
