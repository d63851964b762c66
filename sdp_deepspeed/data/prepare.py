"""The cache is written: parts of a corpus to token ids on disk, by several processes, resumable, complete or hidden."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sdp_deepspeed.atomic_files import complete_or_absent, remove_abandoned, sync
from sdp_deepspeed.data.cache import Cache, cache_folder, no_text, open_caches
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.demand import DemandOfOthers, waiting_for
from sdp_deepspeed.data.journal import Journal
from sdp_deepspeed.data.parts import Part
from sdp_deepspeed.data.prepared import PreparedData, PreparedDataError
from sdp_deepspeed.data.progress import LogProgress
from sdp_deepspeed.data.stream_writer import StreamWriter, Wanted
from sdp_deepspeed.data.tokenize_part import SplitCount, SplitName
from sdp_deepspeed.data.tokenizer import SavedTokenizer
from sdp_deepspeed.data.worker import WorkerSetup
from sdp_deepspeed.data.workers import InThisProcess, Workers, WorkQueue, num_cores
from sdp_deepspeed.folder_lock import LOCK, FolderInUseError, hold

log = logging.getLogger(__name__)

# Less is done before another process has started.
_SMALL_BYTES = 3_000_000
_SECONDS_BETWEEN_TRIES = 1.0


def prepare(config: DataConfig, *, progress: Callable[[], LogProgress] = LogProgress) -> Path:
    """`prepare_all` of a config with one source; returns the folder."""
    (folder,) = prepare_all(config, progress=progress)
    return folder


def prepare_all(config: DataConfig, *, progress: Callable[[], LogProgress] = LogProgress) -> list[Path]:
    """Make the tokens of `config` unless they are cached; returns the folder of each source. Not a collective.

    Processes that start at once may all call this: one writes, the others wait for it. What a killed one has done, the
    next one has not to do again.

    Raises:
        ValueError: a mistake in the config or the data, or no permission to write to `cache_dir`.
        ConnectionError: the hub cannot be reached.
        OSError: the cache's disk is full or fails; names it.
        RuntimeError: a process that tokenizes was killed.
        PreparedDataError: the folder in the cache is damaged.
    """
    cache = cache_folder(config)
    remove_abandoned(cache, "*")
    with naming_the_disk(cache):
        caches = open_caches(config)
        for one in caches:
            write_cache(one, progress=progress())
    return [one.folder for one in caches]


def write_cache(cache: Cache, *, wanted: Callable[[], Wanted] = Wanted, progress: LogProgress) -> None:
    """Write until all is there; waits while another process does, which is told what is wanted here."""
    with waiting_for(cache.folder) as say:
        _write_or_wait(cache, wanted, progress, say)


def _write_or_wait(
    cache: Cache, wanted: Callable[[], Wanted], progress: LogProgress, say: Callable[[Wanted | None], None]
) -> None:
    told = False
    while not cache.is_complete:
        if cache.folder.exists():
            raise PreparedDataError(
                f"{cache.folder} was there already without its meta.json, so it is damaged: delete it"
            )
        cache.growing.mkdir(exist_ok=True)
        try:
            writing = hold(cache.growing)
        except (FolderInUseError, FileNotFoundError) as error:  # it is removed when it is complete
            if not told:
                log.info("waiting until another process has prepared %s: %s", cache.folder.name, error)
            told = True
            say(wanted())
            time.sleep(_SECONDS_BETWEEN_TRIES)
            continue
        say(None)
        with writing:
            if cache.is_complete:  # it became so before the folder was made here
                shutil.rmtree(cache.growing, ignore_errors=True)
                return
            _write_locked(cache, wanted, progress)


def _write_locked(cache: Cache, wanted: Callable[[], Wanted], progress: LogProgress) -> None:
    started = time.monotonic()
    log.info("preparing %s text (once, then cached in %s)", cache.config.source, cache.folder)
    with _removed_if_useless(cache, lambda: _has_parts(cache)):  # one bad read of a network is no reason
        counts = _write(cache, wanted, progress)
    with _removed_if_useless(cache, lambda: False):
        _check(cache, counts)
    prepared = PreparedData(cache.growing, cache.identity, _saved(cache).vocab_size, counts)
    prepared.save()
    for path in (*cache.growing.rglob("*"), cache.growing):
        sync(path)
    os.rename(cache.growing, cache.folder)
    (cache.folder / LOCK).unlink(missing_ok=True)  # who waits for it looks for the folder first
    sync(cache.folder.parent)
    log.info("prepared in %.1f s: %s", time.monotonic() - started, prepared)


@contextmanager
def _removed_if_useless(cache: Cache, has_use: Callable[[], bool]) -> Iterator[None]:
    """After a mistake in the text nothing stays that is of no use: with other text it is another cache."""
    try:
        yield
    except ValueError:
        if not has_use():
            shutil.rmtree(cache.growing, ignore_errors=True)
        raise


def _has_parts(cache: Cache) -> bool:
    journal = Journal(cache.growing)
    journal.refresh()
    return len(journal) > 0


def _write(cache: Cache, wanted: Callable[[], Wanted], progress: LogProgress) -> Mapping[SplitName, SplitCount]:
    tokenizer, parts = _saved(cache), cache.stream()
    if not parts:
        raise ValueError(no_text(cache.config))
    setup = WorkerSetup(tokenizer, cache.config.validation_fraction)
    with _working(setup, parts, cache.config) as workers, progress:
        writer = StreamWriter(
            cache.growing, parts, workers, vocab_size=tokenizer.vocab_size, max_bytes=cache.config.max_bytes
        )
        progress.start(parts, writer.journal)
        writer.write(wanted, on_part=progress.part, others=DemandOfOthers(cache.folder))
    return writer.journal.counts()


def _saved(cache: Cache) -> SavedTokenizer:
    """The tokenizer beside its tokens, copied if it is not there."""
    folder = cache.growing / "tokenizer"
    if not folder.is_dir():
        with complete_or_absent(folder) as staging:
            for path in cache.tokenizer.folder.iterdir():
                shutil.copyfile(path, staging / path.name)
    return replace(cache.tokenizer, folder=folder)


@contextmanager
def _working(setup: WorkerSetup, parts: Sequence[Part], config: DataConfig) -> Iterator[WorkQueue]:
    if config.workers is None and sum(part.size for part in parts) < _SMALL_BYTES:
        yield InThisProcess(setup)
        return
    with Workers(setup, num_workers(config)).running() as workers:
        yield workers


def num_workers(config: DataConfig) -> int:
    """Of one source. While a model trains on the CPUs' other cores, it needs only as many as keep up with it."""
    return config.workers or max(1, num_cores() // (4 if config.during else 1))


@contextmanager
def naming_the_disk(cache: Path) -> Iterator[None]:
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


def _check(cache: Cache, counts: Mapping[SplitName, SplitCount]) -> None:
    train, held = counts["train"].documents, counts["validation"].documents
    fraction = cache.config.validation_fraction
    if train + held == 0:
        raise ValueError(no_text(cache.config))
    if train == 0 or (held == 0 and fraction > 0):
        raise ValueError(
            f"{cache.where()}: {train} documents to train on and {held} held out with validation_fraction "
            f"{fraction}: both need text. Change validation_fraction, give more documents, or let "
            'text files be cut with text_documents "paragraph"'
        )
