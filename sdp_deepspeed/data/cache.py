"""The folders of a config's tokens: one for each source, which is complete or hidden, and grows while it is hidden."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import complete_or_absent
from sdp_deepspeed.data import tokenizer as tokenizers
from sdp_deepspeed.data.config import DEFAULT_VOCAB_SIZE, DataConfig
from sdp_deepspeed.data.corpus import Corpus, open_corpus
from sdp_deepspeed.data.parts import Part, capped, documents_of, in_stream_order
from sdp_deepspeed.data.source_mix import PERIOD, shares
from sdp_deepspeed.data.tokenize_part import is_held_out
from sdp_deepspeed.data.tokenizer import SavedTokenizer

log = logging.getLogger(__name__)

# Part of every key: raise it when the same config would give other tokens or files.
_FORMAT = 2


@dataclass(frozen=True)
class Cache:
    """Where the tokens of one source are, or will be.

    Args:
        config: of this source alone.
        corpus: its text.
        folder: where they are once all are there.
        identity: hash of corpus, split and tokenizer.
        tokenizer: that all sources share.
    """

    config: DataConfig
    corpus: Corpus
    folder: Path
    identity: str
    tokenizer: SavedTokenizer

    @property
    def is_complete(self) -> bool:
        return (self.folder / "meta.json").is_file()

    @property
    def growing(self) -> Path:
        """Where they are until then. Hidden, so that nobody takes it for complete; not removed when its writer dies."""
        return self.folder.with_name(f".{self.folder.name}.growing")

    @property
    def current(self) -> Path:
        return self.folder if self.is_complete else self.growing

    def stream(self) -> list[Part]:
        """The parts in the order in which they are tokenized."""
        return in_stream_order(self.corpus.parts())

    def where(self) -> str:
        """The source, for messages."""
        return where(self.config)


def open_caches(config: DataConfig) -> list[Cache]:
    """The caches of all sources, with the one tokenizer that they share; trains it unless it is cached.

    They are small and travel to other processes.

    Raises:
        ValueError: a mistake in the config or the data, or no permission to write to `cache_dir`.
        ConnectionError: the hub cannot be reached.
    """
    folder = cache_folder(config)
    sources = [(source, open_corpus(source)) for source in config.each_source()]
    tokenizer, saved = _trained(config, sources, folder) if config.tokenizer is None else _given(config, folder)
    identity = tokenizers.identity(tokenizer)
    return [_cache(source, corpus, folder, SavedTokenizer.of(tokenizer, saved), identity) for source, corpus in sources]


def cache_folder(config: DataConfig) -> Path:
    """`cache_dir`, which is there and can be written to; ValueError if not."""
    cache = Path(config.cache_dir).expanduser().resolve()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cache_dir {config.cache_dir!r} cannot be made: {error}. Give one that you own") from error
    if not os.access(cache, os.W_OK):
        raise ValueError(f"cache_dir {config.cache_dir!r} cannot be written to: give one that you own")
    return cache


def _cache(config: DataConfig, corpus: Corpus, folder: Path, tokenizer: SavedTokenizer, rules: str) -> Cache:
    identity = _hash(corpus.fingerprint(), config.max_bytes, rules, config.validation_fraction)
    return Cache(config, corpus, folder / f"data-{identity[:20]}", identity, tokenizer)


def _hash(*what: Any) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, *what]).encode()).hexdigest()


def _given(config: DataConfig, folder: Path) -> tuple[Any, Path]:
    """The tokenizer that the config names, and where it is saved."""
    tokenizer = tokenizers.load_tokenizer(config.tokenizer or "")
    saved = folder / f"tokenizer-{_hash(tokenizers.identity(tokenizer), _templates(tokenizer))[:20]}"
    _save(tokenizer, saved)
    return tokenizer, saved


def _templates(tokenizer: Any) -> str:
    """What a tokenizer has beside its rules, and an exported model's shall have too."""
    return repr(getattr(tokenizer, "chat_template", None))


def _save(tokenizer: Any, folder: Path) -> None:
    if not folder.is_dir():
        with complete_or_absent(folder, concurrent=True) as staging:
            tokenizer.save_pretrained(staging)


def _trained(config: DataConfig, sources: Sequence[tuple[DataConfig, Corpus]], folder: Path) -> tuple[Any, Path]:
    """The tokenizer of these texts, and where it is saved."""
    from transformers import AutoTokenizer

    vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
    texts = [(corpus.fingerprint(), source.max_bytes) for source, corpus in sources]
    parameters = (vocab_size, tokenizers.TRAINING_BYTES, tokenizers.LONGEST_RUN, config.validation_fraction)
    saved = folder / f"tokenizer-{_hash(texts, config.sources and shares(config.sources)[0], parameters)[:20]}"
    if not saved.is_dir():
        _save(tokenizers.train_tokenizer(_training_documents(config, sources), vocab_size), saved)
    return AutoTokenizer.from_pretrained(saved), saved


def _training_documents(config: DataConfig, sources: Sequence[tuple[DataConfig, Corpus]]) -> Iterator[str]:
    """Of each source as much as its share; no held-out text: merges learned from it would make it look easier."""
    counts = shares(config.sources)[0] if config.sources else [PERIOD]
    for (source, corpus), count in zip(sources, counts, strict=True):
        room = tokenizers.TRAINING_BYTES * count // PERIOD
        found = False
        for text in capped(documents_of(in_stream_order(corpus.parts())), source.max_bytes):
            found = True
            if not is_held_out(text, config.validation_fraction):
                yield text
                room -= len(text.encode("utf-8"))
            if room <= 0:
                break
        if not found:
            raise ValueError(no_text(source))


def where(config: DataConfig) -> str:
    """The source, for messages."""
    return f"source {config.source!r}" + (f", path {config.path!r}" if config.path else "")


def no_text(config: DataConfig) -> str:
    """What to say of a source without any."""
    limit = f" within max_bytes {config.max_bytes}" if config.max_bytes else ""
    return f"{where(config)}: no document with text{limit}: give other text or a larger max_bytes"
