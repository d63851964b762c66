"""The cache: what decides its content, who may make it, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from sdp_deepspeed.atomic_files import complete_or_absent
from sdp_deepspeed.data import DataConfig
from sdp_deepspeed.data import tokenizer as tokenizers
from sdp_deepspeed.data.prepare import prepare
from sdp_deepspeed.data.tokenize_part import is_held_out
from sdp_deepspeed.lock_owner import machine
from tests.helpers.documents import NUM_DOCUMENTS, numbers, text


def test_tokenizer_learns_nothing_from_held_out_documents(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, learned = tokenizers.train_tokenizer, set[int]()

    def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Any:
        texts = list(documents)
        learned.update(*map(numbers, texts))
        return real(texts, vocab_size)

    monkeypatch.setattr(tokenizers, "train_tokenizer", train_tokenizer)
    prepare(config())
    assert learned == {number for number in range(NUM_DOCUMENTS) if not is_held_out(text(number), 0.1)}


def test_cache_is_used_and_keyed_by_what_matters(
    config: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare(config())
    for changes in ({"vocab_size": 300}, {"max_bytes": 5000}, {"validation_fraction": 0.2}):
        assert prepare(config(**changes)) != folder
    monkeypatch.setattr(tokenizers, "train_tokenizer", None)
    for changes in ({}, {"sequence_length": 64}, {"seed": 3}, {"validation_blocks": 2}):
        assert prepare(config(**changes)) == folder


def test_many_at_once_make_one_cache(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: prepare(config()), range(4)))
    assert len(folders) == 1
    (tokenizer,) = (tmp_path / "cache").glob("tokenizer-*")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {tokenizer.name, folders.pop().name}


def test_failure_leaves_nothing_behind(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no document with text within max_bytes 3"):
        prepare(config(max_bytes=3))
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_killed_preparations_left_is_removed(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    """Of other texts, too, and where nothing has to be prepared; what is being prepared stays."""
    for _ in range(2):
        left = tmp_path / "cache" / f".data-0.{machine()}.0.writing"
        left.mkdir(parents=True)
        (left / "train.bin").write_bytes(b"torn")
        with complete_or_absent(tmp_path / "cache" / "data-1", concurrent=True) as alive:
            prepare(config())
            assert alive.exists()
        assert not left.exists()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_full_cache_disk_is_named(
    config: Callable[..., DataConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sdp_deepspeed.data.stream_writer.StreamWriter.write", mock.Mock(side_effect=error))
        with pytest.raises(OSError, match=f"No space left on device.*: '{tmp_path / 'cache'}'"):
            prepare(config())
    assert list((tmp_path / "cache").glob("data-*")) == []
    prepare(config())


def test_a_single_document_cannot_be_split(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("words and words\n\n" * 100)
    with pytest.raises(ValueError, match=r'both need text.*text_documents "paragraph"'):
        prepare(config(path=str(tmp_path / "one.txt")))


def test_cache_dir_that_cannot_be_made(config: Callable[..., DataConfig], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_dir .* cannot be made"):
        prepare(config(cache_dir=str(tmp_path / "file" / "cache")))
