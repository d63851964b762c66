"""Training that begins with the first tokens: who writes them on each machine, and how every rank opens them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sdp_deepspeed.data.background import BackgroundWriter
from sdp_deepspeed.data.block_order import DEFAULT_WINDOW, Blocks, StreamedBlocks
from sdp_deepspeed.data.cache import open_caches
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.growing import NO_WRITER, GrowingTokens, Writer
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.source_mix import PERIOD, shares
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_all_ranks
from sdp_deepspeed.lock_owner import machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachePlace:
    """What every rank needs to know of a cache; small.

    Args:
        folder: where it is when it is complete.
        growing: where it is until then.
        identity: of its content.
        vocab_size: of the tokenizer.
    """

    folder: Path
    growing: Path
    identity: str
    vocab_size: int


@dataclass(frozen=True)
class OpenStream:
    """A source of which the first tokens are there.

    Args:
        order: of its training blocks.
        held_out: [V, T] ids, fixed for the run; None without a validation split.
        prepared: counts so far.
        tokenizer: of Transformers.
    """

    order: StreamedBlocks
    held_out: Blocks | None
    prepared: PreparedData
    tokenizer: Any


def cache_places(config: DataConfig) -> list[CachePlace]:
    """Of all sources. Reads no text unless a tokenizer is to be trained."""
    from sdp_deepspeed.data.tokenizer import vocabulary_size

    return [
        CachePlace(cache.folder, cache.growing, cache.identity, vocabulary_size(cache.tokenizer))
        for cache in open_caches(config)
    ]


def start_writers(config: DataConfig, places: Sequence[CachePlace], communicator: Gatherer) -> list[Writer]:
    """On the first rank of each machine one process for each source; a collective. Ranks of one machine need one, and
    machines without a shared file system one each."""
    machines = communicator.gather_objects(machine())
    starts = machines.index(machine()) == communicator.rank
    return run_on_all_ranks(
        communicator, lambda: [_start(config, number, place, starts) for number, place in enumerate(places)]
    )


def _start(config: DataConfig, number: int, place: CachePlace, starts: bool) -> Writer:
    if not starts or (place.folder / "meta.json").is_file():
        return NO_WRITER
    writer = BackgroundWriter(config, number, place.folder)
    writer.start()
    return Writer(tell=writer.tell, look=writer.look)


def open_streams(config: DataConfig, places: Sequence[CachePlace], writers: Sequence[Writer]) -> list[OpenStream]:
    """Wait for the first tokens of all sources, and for their held-out ones.

    Raises:
        ValueError, OSError, PreparedDataError: what the processes that write them found.
    """
    counts = validation_counts(config)
    return [_open(config, place, writer, count) for place, writer, count in zip(places, writers, counts, strict=True)]


def validation_counts(config: DataConfig) -> list[int]:
    """Held-out blocks of each source: their share of `validation_blocks`, at least one; 0 without any."""
    num_blocks = config.validation_blocks or 0
    if config.sources is None:
        return [num_blocks]
    return [max(1, num_blocks * count // PERIOD) if num_blocks else 0 for count in shares(config.sources)[0]]


def _open(config: DataConfig, place: CachePlace, writer: Writer, num_held_out: int) -> OpenStream:
    tokens = GrowingTokens(place.folder, place.growing, vocab_size=place.vocab_size, writer=writer)
    length = config.sequence_length
    held_out = None
    if num_held_out:
        log.info("waiting for %d held-out blocks of %s", num_held_out, place.folder.name)
        num_blocks = tokens.wait_for_validation(num_held_out * length) // length
        held_out = tokens.blocks("validation", np.arange(num_blocks), length)
    tokens.wait("train", 0, 1)
    order = StreamedBlocks(
        tokens,
        sequence_length=length,
        seed=config.seed,
        window=config.shuffle_window or DEFAULT_WINDOW,
        data=place.identity,
    )
    prepared = PreparedData(tokens.current, place.identity, place.vocab_size, tokens.journal.counts())
    return OpenStream(order, held_out, prepared, _tokenizer(tokens))


def _tokenizer(tokens: GrowingTokens) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokens.current / "tokenizer")
    except (OSError, ValueError):  # the folder became complete, and has another name, while it was read
        return AutoTokenizer.from_pretrained(tokens.current / "tokenizer")
