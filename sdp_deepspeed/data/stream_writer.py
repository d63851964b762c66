"""The writer of a cache: parts go to workers, their tokens to the streams, as far ahead as is wanted."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.data.journal import Entry, Journal, Place
from sdp_deepspeed.data.parts import Part
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.tokenize_part import SPLITS, SplitName, Task, TokenizedPart, path_of, token_dtype
from sdp_deepspeed.data.workers import WorkQueue

# The journal is synced this often: each time costs a network file system a round trip.
_COMMIT_SECONDS = 0.5
_POLL_SECONDS = 0.05
_COPY_BYTES = 2**20
STAGING = "tokenizing"


@dataclass(frozen=True)
class Wanted:
    """What a reader waits for.

    Args:
        validation: held-out tokens from the start.
        first, stop: training tokens; infinity for all there are.
        reopen: a part that begins at `first` or before it, of a run whose cache was lost.
    """

    validation: int = 0
    first: int = 0
    stop: float = math.inf
    reopen: Place | None = None


class StreamWriter:
    """Writes `train.bin`, `validation.bin` and their journal in a folder that this process alone writes to.

    Args:
        folder: of the cache.
        parts: the stream.
        workers: that are running.
        vocab_size: of the tokenizer.
        max_bytes: of text in the stream; None means all.
    """

    def __init__(
        self, folder: Path, parts: Sequence[Part], workers: WorkQueue, *, vocab_size: int, max_bytes: int | None = None
    ) -> None:
        self.journal = Journal(folder)
        self._folder, self._parts, self._workers = folder, parts, workers
        self._itemsize = token_dtype(vocab_size).itemsize
        self._max_bytes = max_bytes
        self._issued: list[int] = []
        self._uncommitted: list[Entry] = []
        self._reopened: dict[int, Place] = {0: Place(0, 0, 0, 0)}

    def write(
        self,
        wanted: Callable[[], Wanted],
        *,
        on_part: Callable[[Part, TokenizedPart], None],
        others: Callable[[], Sequence[Wanted]] = tuple,
    ) -> None:
        """Until all is there, or forever while less is wanted. `on_part` hears of each part that was tokenized.

        What `others` want comes once what is `wanted` is there.

        Raises:
            ValueError, OSError, RuntimeError: a part cannot be read or written, or workers were killed.
        """
        self.journal.refresh()
        staging = self._folder / STAGING
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        committed = time.monotonic()
        with ExitStack() as stack:
            files = {split: stack.enter_context(_open(self._folder / f"{split}.bin")) for split in SPLITS}
            while not (self.journal.is_complete and not self._uncommitted):
                self._issue([wanted(), *others()], staging)
                if self._uncommitted and (not self._issued or time.monotonic() - committed > _COMMIT_SECONDS):
                    self._commit(files)
                    committed = time.monotonic()
                elif self._issued:
                    self._merge_next(staging, files, on_part)
                else:
                    time.sleep(_POLL_SECONDS)
            for split, file in files.items():  # what was torn
                assert self.journal.last is not None
                file.truncate(getattr(self.journal.last.end, split) * self._itemsize)
        shutil.rmtree(staging)

    def _issue(self, demands: Sequence[Wanted], staging: Path) -> None:
        for wanted in demands:
            if wanted.reopen is not None:
                self._reopened[wanted.reopen.part] = wanted.reopen
        while self._workers.has_room and (part := self._next_part_of_all(demands)) is not None:
            self._issued.append(part)
            self._workers.submit(Task(part, self._parts[part], staging))

    def _next_part_of_all(self, demands: Sequence[Wanted]) -> int | None:
        parts = (self._next_part(wanted) for wanted in demands)
        return next((part for part in parts if part is not None), None)

    def _next_part(self, wanted: Wanted) -> int | None:
        """The part to tokenize next: for the held-out text, for what is read now, or what is left."""
        if self.journal.contiguous("validation", 0) < wanted.validation:
            return self._not_taken_from(0)
        if self.journal.contiguous("train", wanted.first) >= wanted.stop:
            return None
        place = self.journal.place_of(wanted.first)
        if place is None:
            known = [place for place in self._reopened.values() if place.train <= wanted.first]
            place = max(known, key=lambda place: place.part)
        part = self._not_taken_from(place.part)
        return self._not_taken_from(0) if part is None else part

    def _not_taken_from(self, first: int) -> int | None:
        """The first part that is neither written nor with a worker."""
        last, issued = self.journal.last, set(self._issued)
        stop = len(self._parts) if last is None else last.place.part + 1
        part = self.journal.first_missing(first)
        while part in issued:
            part = self.journal.first_missing(part + 1)
        return part if part < stop else None

    def _merge_next(
        self, staging: Path, files: dict[SplitName, BinaryIO], on_part: Callable[[Part, TokenizedPart], None]
    ) -> None:
        try:
            result = self._workers.next_result(_POLL_SECONDS)
        except TimeoutError:
            return
        part = self._issued.pop(0)
        last = self.journal.last
        if last is None or part <= last.place.part:
            result = self._within_limit(result, staging)
            self._merge(result, staging, files)
            on_part(self._parts[part], result)
        _remove(staging, part)

    def _within_limit(self, result: TokenizedPart, staging: Path) -> TokenizedPart:
        """The part again as far as `max_bytes` allows, if it exceeds that."""
        room = None if self._max_bytes is None else self._max_bytes - self._place_of(result.place).bytes
        if room is None or sum(count.bytes for count in result.counts.values()) <= room:
            return result
        for part in self._issued:
            self._workers.next_result()
            _remove(staging, part)
        self._issued.clear()
        self._workers.submit(Task(result.place, self._parts[result.place], staging, max_bytes=room))
        return self._workers.next_result()

    def _place_of(self, part: int) -> Place:
        before = self.journal.get(part - 1)
        return before.end if before is not None else self._reopened[part]

    def _merge(self, result: TokenizedPart, staging: Path, files: dict[SplitName, BinaryIO]) -> None:
        place = self._place_of(result.place)
        is_last = result.is_cut or result.place == len(self._parts) - 1
        entry = Entry(place, result.counts["train"], result.counts["validation"], is_last)
        after = self.journal.get(result.place + 1)
        if after is not None and after.place != entry.end:
            raise PreparedDataError(
                f"{self._folder}: part {result.place + 1} began at {after.place}, now at {entry.end}: the text has "
                f"changed since it was tokenized. Delete {self._folder}"
            )
        for split, file in files.items():
            file.seek(getattr(place, split) * self._itemsize)
            with open(regular(path_of(staging, result.place, split)), "rb") as tokens:
                shutil.copyfileobj(tokens, file, _COPY_BYTES)
        self.journal.add(entry)
        self._uncommitted.append(entry)

    def _commit(self, files: dict[SplitName, BinaryIO]) -> None:
        """Tokens first: a line in the journal says that they are on the disk."""
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        self.journal.append(self._uncommitted)
        self._uncommitted.clear()


def _open(path: Path) -> BinaryIO:
    """To write at any place, without losing what is there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")


def _remove(staging: Path, part: int) -> None:
    for split in SPLITS:
        path_of(staging, part, split).unlink()
