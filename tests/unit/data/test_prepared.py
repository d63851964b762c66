"""Streams of token ids on disk: what is in them, and what is said when they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sdp_deepspeed.data import DataConfig, build
from sdp_deepspeed.data import tokenizer as tokenizers
from sdp_deepspeed.data.prepare import prepare
from sdp_deepspeed.data.prepared import PreparedData, PreparedDataError
from sdp_deepspeed.data.tokenize_part import SPLITS, is_held_out, token_dtype
from tests.helpers.documents import NUM_DOCUMENTS, text


def test_streams_are_the_documents_with_ends_between(config: Callable[..., DataConfig]) -> None:
    prepared = PreparedData.load(prepare(config()))
    tokenizer = prepared.tokenizer()
    for split in SPLITS:
        held = split == "validation"
        tokens = prepared.blocks(split, 1)[:, 0]
        expected = [text(i) for i in range(NUM_DOCUMENTS) if is_held_out(text(i), 0.1) is held]
        documents = tokenizer.decode(tokens.tolist()).split(tokenizers.END_OF_DOCUMENT)
        assert documents == [*expected, ""]
        assert prepared.counts[split].documents == len(expected)
        assert prepared.counts[split].bytes == sum(len(text.encode()) for text in expected)
        assert prepared.counts[split].tokens == len(tokens)


def test_damaged_and_invisible_caches_are_told(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    folder = prepare(config())
    (folder / "train.bin").write_bytes(b"short")
    with pytest.raises(PreparedDataError, match=r"train.bin is damaged \(5 bytes, expected \d+\): delete"):
        build(config(), micro_batch=1)
    with pytest.raises(PreparedDataError, match="must be on a file system that all ranks see"):
        PreparedData.load(tmp_path / "elsewhere", wait_seconds=0)


@pytest.mark.parametrize(
    "content", [b"", b'{"identity": "x', b"[]", b"{}", b'{"counts": {"train": 1}}', b"[" * 100_000]
)
def test_a_manifest_that_is_none_is_told_with_what_to_do(config: Callable[..., DataConfig], content: bytes) -> None:
    folder = prepare(config())
    (folder / "meta.json").write_bytes(content)
    with pytest.raises(PreparedDataError, match=rf"{folder}/meta.json cannot be read \(.*\): delete {folder}"):
        PreparedData.load(folder)


@pytest.mark.parametrize("content", [b"{}", None])
def test_another_tokenizer_than_was_written_is_refused(
    config: Callable[..., DataConfig], content: bytes | None
) -> None:
    folder = prepare(config())
    file = folder / "tokenizer" / "tokenizer_config.json"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PreparedDataError, match=rf"{file} is missing, or not as it was written: delete {folder}"):
        PreparedData.load(folder)


def test_a_file_that_came_to_the_tokenizer_is_refused(config: Callable[..., DataConfig]) -> None:
    """Tokens that it adds would change the vocabulary."""
    folder = prepare(config())
    file = folder / "tokenizer" / "added_tokens.json"
    file.write_text("{}")
    with pytest.raises(PreparedDataError, match=rf"{file} is missing, or not as it was written"):
        PreparedData.load(folder)


def test_a_disk_that_cannot_be_read_is_no_reason_to_delete(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(config())

    def refuse(path: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("sdp_deepspeed.data.prepared.regular", refuse)
    with pytest.raises(PreparedDataError, match=rf"the prepared data {folder} cannot be read: .*Permission denied"):
        PreparedData.load(folder)


def test_a_cache_of_before_there_were_hashes_is_used(config: Callable[..., DataConfig]) -> None:
    folder = prepare(config())
    file = folder / "meta.json"
    file.write_text(
        json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "tokenizer"})
    )
    assert PreparedData.load(folder).tokenizer().eos_token_id is not None


def test_ids_fit_what_is_stored() -> None:
    assert token_dtype(2**16).itemsize == 2
    assert token_dtype(2**16 + 1).itemsize == 4
