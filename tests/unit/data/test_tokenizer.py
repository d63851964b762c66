"""The trained tokenizer can write down anything and lives on without this package; others are taken as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from sdp_deepspeed.data import DataConfig
from sdp_deepspeed.data.prepare import prepare
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.tokenizer import (
    LONGEST_RUN,
    _without_long_runs,
    encode,
    identity,
    load_tokenizer,
    train_tokenizer,
    vocabulary_size,
)
from tests.helpers.properties import examples

WORDS = ["the cat sat on the mat\n", "the dog ran to the cat\n"] * 20


@cache
def _trained(vocab_size: int = 300) -> Any:
    return train_tokenizer(WORDS, vocab_size)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@examples(100)
def test_any_text_comes_back(text: str) -> None:
    (ids,) = encode(_trained(), [text])
    assert _trained().decode(ids, clean_up_tokenization_spaces=False) == text


def test_vocabulary_is_an_upper_bound() -> None:
    assert len(_trained(260)) == 260
    # 44 bytes of two sentences have few pairs: the corpus cannot give 5000.
    assert 257 < len(_trained(5000)) < 400


def test_saved_folder_loads_and_encodes_the_same(tmp_path: Path) -> None:
    _trained().save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert encode(loaded, WORDS[:2]) == encode(_trained(), WORDS[:2])
    assert identity(loaded) == identity(_trained())
    assert loaded.eos_token == loaded.pad_token == "<|endoftext|>"


def test_limits_saved_in_a_tokenizer_cut_nothing(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(WORDS, 300)
    whole = encode(tokenizer, WORDS[:2])
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    tokenizer.save_pretrained(tmp_path)
    assert encode(load_tokenizer(str(tmp_path)), WORDS[:2]) == whole


def test_any_tokenizer_of_transformers_makes_the_data(tmp_path: Path) -> None:
    _trained().save_pretrained(tmp_path / "own")
    (tmp_path / "text.txt").write_text("\n".join(f"the cat number {i}" for i in range(200)))
    config = DataConfig(
        source="files",
        path=str(tmp_path / "text.txt"),
        text_documents="line",
        tokenizer=str(tmp_path / "own"),
        cache_dir=str(tmp_path / "cache"),
    )
    prepared = PreparedData.load(prepare(config))
    assert prepared.vocab_size == len(_trained())
    assert identity(prepared.tokenizer()) == identity(_trained())


def test_tokenizers_that_do_not_serve_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a folder or a name on the hub"):
        load_tokenizer(str(tmp_path / "absent"))
    without_end = train_tokenizer(WORDS, 300)
    without_end.eos_token = None
    without_end.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("run", ["abcdefgh", " ", "0123456789", "-+", "\u4e2d"])
def test_no_word_that_is_learned_from_is_too_long(run: str) -> None:
    """Else the time grows with the square of it: a minute for a third of a megabyte of one word."""
    text = "two words " + run * 5000 + " and more"
    parts = list(_without_long_runs(text))
    assert "".join(parts) == text
    words = ByteLevel(add_prefix_space=False)
    assert max(len(word) for part in parts for word, _ in words.pre_tokenize_str(part)) <= 3 * (LONGEST_RUN + 1)
    assert list(_without_long_runs("two words")) == ["two words"]


def test_training_shows_progress(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("sdp_deepspeed.data.tokenizer.LOG_SECONDS", 0.001)
    told = threading.Event()
    caplog.set_level("INFO")

    def documents() -> Iterator[str]:
        yield "some words"
        while "so far" not in caplog.text:
            told.wait(0.001)

    train_tokenizer(documents(), 300)
    assert caplog.messages[0] == "training a tokenizer of up to 300 entries"


def test_gaps_in_a_vocabulary_need_room_too() -> None:
    tokenizer = train_tokenizer(WORDS, 300)
    assert vocabulary_size(tokenizer) == len(tokenizer)
    tokenizer.get_vocab = lambda: {"a": 0, "b": 400}
    assert vocabulary_size(tokenizer) == 401
