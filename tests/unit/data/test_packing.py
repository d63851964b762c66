"""Streams of token ids on disk: what is in them, and what is said when they are damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sdp_deepspeed.data import DataConfig, build
from sdp_deepspeed.data import tokenizer as tokenizers
from sdp_deepspeed.data.packing import PreparedData, is_held_out, token_dtype
from sdp_deepspeed.data.prepare import prepare
from tests.helpers.documents import NUM_DOCUMENTS, text


def test_streams_are_the_documents_with_ends_between(config: Callable[..., DataConfig]) -> None:
    prepared = PreparedData.load(prepare(config()))
    tokenizer = prepared.tokenizer()
    for split, held in (("train", False), ("validation", True)):
        tokens = prepared.blocks(split, 1)[:, 0]  # type: ignore[arg-type]
        expected = [text(i) for i in range(NUM_DOCUMENTS) if is_held_out(text(i), 0.1) is held]
        documents = tokenizer.decode(tokens.tolist()).split(tokenizers.END_OF_DOCUMENT)
        assert documents == [*expected, ""]
        assert prepared.counts[split].documents == len(expected)
        assert prepared.counts[split].bytes == sum(len(text.encode()) for text in expected)
        assert prepared.counts[split].tokens == len(tokens)


def test_damaged_and_invisible_caches_are_told(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    folder = prepare(config())
    (folder / "train.bin").write_bytes(b"short")
    with pytest.raises(RuntimeError, match=r"train.bin is damaged \(5 bytes, expected \d+\): delete"):
        build(config(), micro_batch=1)
    with pytest.raises(RuntimeError, match="must be on a file system that all ranks see"):
        PreparedData.load(tmp_path / "elsewhere", wait_seconds=0)


def test_ids_fit_what_is_stored() -> None:
    assert token_dtype(2**16).itemsize == 2
    assert token_dtype(2**16 + 1).itemsize == 4
