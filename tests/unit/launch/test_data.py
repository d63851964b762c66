"""Blocks of tokens from local files, mapped and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, config

from data import Data, Stream, collate, load_blocks

LENGTH = 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")


def documents(tag: str, number: int = 60) -> Iterator[dict[str, str]]:
    for index in range(number):
        yield {"text": f"{tag} " * (30 + index % 7) + f"document {index}"}


def source(folder: Path, kind: str, tag: str = "alpha", column: str = "text") -> dict[str, Any]:
    rows = [{column: row["text"]} for row in documents(tag)]
    path = folder / f"{tag}.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        Dataset.from_list(rows).to_parquet(str(path), batch_size=8)
    else:
        path.write_text("\n".join(row[column] for row in rows))
    return {"path": {"jsonl": "json", "txt": "text"}.get(kind, kind), "data_files": str(path)}


def data(*sources: dict[str, Any], **options: Any) -> Data:
    return Data(list(sources), LENGTH, vocab_size=300, **({"validation_fraction": 0.2} | options))


def texts(blocks: Any, rows: Any) -> str:
    return "".join(blocks.tokenizer.batch_decode([row["input_ids"] for row in rows]))


@pytest.mark.parametrize(
    ("kind", "streaming"),
    [
        ("jsonl", False),
        ("parquet", False),
        ("txt", False),
        ("jsonl", True),
        ("txt", True),
        pytest.param("parquet", True, marks=pytest.mark.slow),  # its readers take 5 seconds to end
    ],
)
def test_files_become_blocks_of_one_length(tmp_path: Path, kind: str, streaming: bool) -> None:
    blocks = load_blocks(data(source(tmp_path, kind), streaming=streaming), 0, tmp_path)
    rows = [*blocks.train]
    assert {len(row["input_ids"]) for row in [*rows, *blocks.validation]} == {LENGTH}
    assert texts(blocks, rows).count(blocks.tokenizer.eos_token) > 40, "one after each document"
    assert {*collate(rows[:3])} == {"input_ids", "labels"}


def test_a_document_and_its_copies_are_on_one_side(tmp_path: Path) -> None:
    one = source(tmp_path, "jsonl")
    copies = [json.loads(line) for line in Path(one["data_files"]).read_text().splitlines()]
    again = tmp_path / "again.jsonl"
    again.write_text("".join(json.dumps(row) + "\n" for row in reversed(copies)))
    blocks = load_blocks(data(one, {"path": "json", "data_files": str(again)}), 0, tmp_path)
    both = (blocks.train, blocks.validation)
    trained, held_out = ({*re.findall(r"document (\d+)<", texts(blocks, rows))} for rows in both)
    assert trained
    assert held_out
    assert not trained & held_out


def test_blocks_are_drawn_by_weight(tmp_path: Path) -> None:
    heavy, light = source(tmp_path, "jsonl", "heavy") | {"weight": 3}, source(tmp_path, "jsonl", "light")
    blocks = load_blocks(data(heavy, light), 0, tmp_path)
    text = texts(blocks, islice(blocks.train, 200))
    assert 2 < text.count("heavy") / text.count("light") < 4.5  # 3 in the mean; 200 draws have a deviation of 0.5


def test_a_trained_tokenizer_is_kept_with_the_run(tmp_path: Path) -> None:
    first = load_blocks(data(source(tmp_path, "jsonl")), 0, tmp_path)
    other = load_blocks(data(source(tmp_path, "jsonl", "other")), 0, tmp_path)
    assert first.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    named = load_blocks(
        data(source(tmp_path, "jsonl"), tokenizer=str(tmp_path / "tokenizer")), 0, tmp_path / "elsewhere"
    )
    assert named.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_prepared_blocks_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = data(source(tmp_path, "jsonl"))
    first = load_blocks(settings, 0, tmp_path)
    monkeypatch.setattr("data.xxhash.xxh64_intdigest", None)  # what is not in the cache would call it
    again = load_blocks(settings, 0, tmp_path)
    assert again.train[:] == first.train[:]


def shards(folder: Path, tag: str) -> dict[str, Any]:
    """Files, which a stream reads in random order (of parquet files it is row groups)."""
    rows = [*documents(tag)]
    for index in range(6):
        (folder / f"{tag}{index}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[index::6]))
    return {"path": "json", "data_files": str(folder / f"{tag}*.jsonl")}


def test_ranks_of_a_stream_read_different_text(tmp_path: Path) -> None:
    blocks = load_blocks(data(shards(tmp_path, "alpha"), streaming=True), 0, tmp_path).train
    batches = [next(iter(Stream(blocks, rank, 2).loader(20)))["input_ids"].tolist() for rank in range(2)]
    both = [{tuple(row) for row in batch} for batch in batches]
    assert len(both[0] & both[1]) <= 2, "text that repeats itself"


def test_a_stream_does_not_go_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    blocks = load_blocks(data(shards(tmp_path, "alpha"), streaming=True), 0, tmp_path).train
    for rank in range(2):
        Stream(blocks, rank, 2).save(tmp_path)
    with pytest.raises(ValueError, match="2 ranks cannot resume on 4"):
        Stream(blocks, 0, 4).load(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "options", "said"),
    [
        ({"path": "json", "data_files": "nowhere.jsonl"}, {}, "nowhere.jsonl"),
        ({"text_column": "body"}, {}, "no column 'body'"),
        ({}, {"validation_fraction": 1e-9}, "no block is held out"),
    ],
)
def test_wrong_data_are_refused(tmp_path: Path, wrong: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(OSError if "path" in wrong else ValueError, match=said):
        load_blocks(data(source(tmp_path, "jsonl") | wrong, **options), 0, tmp_path)
