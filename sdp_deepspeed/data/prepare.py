"""The cache: corpus, split and tokenizer to a prepared folder, complete or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import complete_or_absent, remove_abandoned
from sdp_deepspeed.data import tokenizer as tokenizers
from sdp_deepspeed.data.config import DEFAULT_VOCAB_SIZE, DataConfig
from sdp_deepspeed.data.corpus import Corpus, open_corpus
from sdp_deepspeed.data.packing import PreparedData, PreparedDataError, SplitCount, is_held_out, pack

log = logging.getLogger(__name__)

# Part of every key: raise it when the same config would give other tokens or files.
_FORMAT = 1
_LOG_SECONDS = 60.0


def prepare(config: DataConfig) -> Path:
    """Make the tokens of `config` unless they are cached; returns their folder. Not a collective.

    Processes that start at once may all call this: each writes a folder of its own, and the first one's stays.

    Raises:
        ValueError: a mistake in the config or the data, or no permission to write to `cache_dir`.
        ConnectionError: the hub cannot be reached.
        OSError: the cache's disk is full or fails; names it.
        PreparedDataError: the folder in the cache is damaged.
    """
    corpus = open_corpus(config)
    given = None if config.tokenizer is None else tokenizers.load_tokenizer(config.tokenizer)
    identity = _identity(config, corpus, given)
    cache = _cache_folder(config)
    remove_abandoned(cache, "data-*")
    folder = cache / f"data-{identity[:20]}"
    if (folder / "meta.json").is_file():
        return folder
    started = time.monotonic()
    log.info("preparing %s text (once, then cached in %s)", config.source, folder)
    with _naming_the_disk(cache), complete_or_absent(folder, concurrent=True) as staging:
        prepared = _write(config, corpus, given, identity=identity, folder=staging)
        log.info("prepared in %.1f s: %s", time.monotonic() - started, prepared)
    if not (folder / "meta.json").is_file():
        raise PreparedDataError(f"{folder} was there already without its meta.json, so it is damaged: delete it")
    return folder


@contextmanager
def _naming_the_disk(cache: Path) -> Iterator[None]:
    """OSError with the cache's path where the system's error, or that of a library in Rust, names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(cache)) from error
    except Exception as error:
        if type(error) is not Exception or "os error" not in str(error):
            raise
        raise OSError(errno.EIO, str(error), str(cache)) from error


def _cache_folder(config: DataConfig) -> Path:
    cache = Path(config.cache_dir).expanduser().resolve()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cache_dir {config.cache_dir!r} cannot be made: {error}. Give one that you own") from error
    if not os.access(cache, os.W_OK):
        raise ValueError(f"cache_dir {config.cache_dir!r} cannot be written to: give one that you own")
    return cache


def _identity(config: DataConfig, corpus: Corpus, given: Any) -> str:
    if given is None:
        parameters = (config.vocab_size or DEFAULT_VOCAB_SIZE, tokenizers.TRAINING_BYTES, tokenizers.LONGEST_RUN)
        tokenizer = f"bpe:{parameters}"
    else:
        tokenizer = tokenizers.identity(given)
    parts = [_FORMAT, corpus.fingerprint(), tokenizer, config.validation_fraction]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _write(config: DataConfig, corpus: Corpus, given: Any, *, identity: str, folder: Path) -> PreparedData:
    tokenizer = given
    if tokenizer is None:
        # On training documents only: merges learned from held-out text would make it look easier.
        tokenizer = tokenizers.train_tokenizer(_training(corpus, config), config.vocab_size or DEFAULT_VOCAB_SIZE)
    tokenizer.save_pretrained(folder / "tokenizer")
    counts = pack(
        _with_progress(corpus.documents()),
        tokenizer=tokenizer,
        folder=folder,
        validation_fraction=config.validation_fraction,
    )
    _check(config, counts)
    prepared = PreparedData(folder, identity, tokenizers.vocabulary_size(tokenizer), counts)
    prepared.save()
    return prepared


def _training(corpus: Corpus, config: DataConfig) -> Iterator[str]:
    return (text for text in corpus.documents() if not is_held_out(text, config.validation_fraction))


def _with_progress(documents: Iterator[str]) -> Iterator[str]:
    """The documents, with a line in the log every minute: large corpora take hours."""
    started = logged = time.monotonic()
    characters = 0
    for number, text in enumerate(documents, start=1):
        yield text
        characters += len(text)
        if time.monotonic() - logged > _LOG_SECONDS:
            logged = time.monotonic()
            rate = characters / 1e6 / (logged - started)
            log.info("%s documents, %.0f million characters, %.1f million/s", f"{number:,}", characters / 1e6, rate)


def _check(config: DataConfig, counts: dict[str, SplitCount]) -> None:
    train, held = counts["train"].documents, counts["validation"].documents
    where = f"source {config.source!r}" + (f", path {config.path!r}" if config.path else "")
    if train + held == 0:
        capped = f" within max_bytes {config.max_bytes}" if config.max_bytes else ""
        raise ValueError(f"{where}: no document with text{capped}: give other text or a larger max_bytes")
    if train == 0 or (held == 0 and config.validation_fraction > 0):
        raise ValueError(
            f"{where}: {train} documents to train on and {held} held out with validation_fraction "
            f"{config.validation_fraction}: both need text. Change validation_fraction, give more documents, or let "
            'text files be cut with text_documents "paragraph"'
        )
