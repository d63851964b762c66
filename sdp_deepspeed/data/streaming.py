"""Training that begins with the first tokens: who writes them on each machine, and how every rank opens them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sdp_deepspeed.data.background import BackgroundWriter, problem_path
from sdp_deepspeed.data.block_order import DEFAULT_WINDOW, Blocks, StreamedBlocks
from sdp_deepspeed.data.cache import Cache, open_caches
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.growing import NO_WRITER, GrowingTokens, Writer
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.source_mix import PERIOD, shares
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_all_ranks
from sdp_deepspeed.lock_owner import machine

log = logging.getLogger(__name__)


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


def start_writers(config: DataConfig, caches: Sequence[Cache], communicator: Gatherer) -> list[Writer]:
    """On the first rank of each machine one process for each source; a collective. Ranks of one machine need one, and
    machines without a shared file system one each."""
    here = machine()
    seen = communicator.gather_objects((here, _look_at_disk(caches), f"{here}.{os.getpid()}"))
    starts = [name for name, *_ in seen].index(here) == communicator.rank
    job = seen[0][2]
    has_own_disk = seen[communicator.rank][1] != seen[0][1]

    def start() -> list[Writer]:
        if has_own_disk:
            _check_same_text(config, caches)
        return [_start(cache, job) for cache in caches]

    def listen() -> list[Writer]:
        return [replace(NO_WRITER, problem=problem_path(cache.folder, job)) for cache in caches]

    return run_on_all_ranks(communicator, start if starts else listen)


def _look_at_disk(caches: Sequence[Cache]) -> tuple[int, int] | None:
    """The same on all machines that share the cache's folder, where rank 0 has saved a tokenizer."""
    try:
        stat = caches[0].tokenizer.folder.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _check_same_text(config: DataConfig, caches: Sequence[Cache]) -> None:
    """On a machine with a disk of its own, which has no tokenizer yet: its text must be what rank 0 has."""
    if all(cache.is_complete for cache in caches):  # copied here, so that no text is read
        return
    for theirs, ours in zip(caches, open_caches(config), strict=True):
        if ours.identity != theirs.identity:
            raise ValueError(
                f"{theirs.where()}: its files differ from those on rank 0's machine (in name, size or time), or so "
                "does the tokenizer: copy them with their times (`cp -p`, `rsync -a`), or let all machines share "
                "cache_dir"
            )


def _start(cache: Cache, job: str) -> Writer:
    if cache.is_complete:
        return NO_WRITER
    writer = BackgroundWriter(cache, job)
    writer.start()
    return Writer(tell=writer.tell, look=writer.look, problem=problem_path(cache.folder, job))


def open_streams(config: DataConfig, caches: Sequence[Cache], writers: Sequence[Writer]) -> list[OpenStream]:
    """Wait for the first tokens of all sources, and for their held-out ones.

    Raises:
        ValueError, OSError, PreparedDataError: what the processes that write them found.
    """
    counts = validation_counts(config)
    return [_open(config, cache, writer, count) for cache, writer, count in zip(caches, writers, counts, strict=True)]


def validation_counts(config: DataConfig) -> list[int]:
    """Held-out blocks of each source: their share of `validation_blocks`, at least one; 0 without any."""
    num_blocks = config.validation_blocks or 0
    if config.sources is None:
        return [num_blocks]
    return [max(1, num_blocks * count // PERIOD) if num_blocks else 0 for count in shares(config.sources)[0]]


def _open(config: DataConfig, cache: Cache, writer: Writer, num_held_out: int) -> OpenStream:
    tokens = GrowingTokens(cache.folder, cache.growing, vocab_size=cache.tokenizer.vocab_size, writer=writer)
    length = config.sequence_length
    held_out = None
    if num_held_out:
        log.info("waiting for %d held-out blocks of %s", num_held_out, cache.folder.name)
        num_blocks = tokens.wait_for_validation(num_held_out * length) // length
        held_out = tokens.blocks("validation", np.arange(num_blocks), length)
    tokens.wait("train", 0, 1)
    order = StreamedBlocks(
        tokens,
        sequence_length=length,
        seed=config.seed,
        window=config.shuffle_window or DEFAULT_WINDOW,
        data=cache.identity,
    )
    prepared = PreparedData(tokens.current, cache.identity, cache.tokenizer.vocab_size, tokens.journal.counts())
    return OpenStream(order, held_out, prepared, _tokenizer(tokens))


def _tokenizer(tokens: GrowingTokens) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokens.current / "tokenizer")
    except (OSError, ValueError):  # the folder became complete, and has another name, while it was read
        return AutoTokenizer.from_pretrained(tokens.current / "tokenizer")
