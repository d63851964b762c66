"""The tokens of a cache that is still written, as a rank reads them: it waits for what is not there yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.data.background import raise_problem
from sdp_deepspeed.data.journal import Journal, Place
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.stream_writer import Wanted
from sdp_deepspeed.data.tokenize_part import SplitName, token_dtype

_SHORTEST_WAIT, _LONGEST_WAIT = 0.01, 0.5
_LOG_SECONDS = 30.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Writer:
    """What a rank needs of the process that writes.

    Args:
        tell: takes what is wanted next; nothing on ranks that did not start it, as all want the same.
        look: called while waiting.
        problem: where it says why there will be no more; None where there is no such process.
    """

    tell: Callable[[Wanted], None]
    look: Callable[[], None]
    problem: Path | None = None

    def raise_problem(self) -> None:
        """Its error, if it has failed."""
        if self.problem is not None:
            raise_problem(self.problem)


NO_WRITER = Writer(tell=lambda wanted: None, look=lambda: None)


class GrowingTokens:
    """Both streams of one source.

    Args:
        folder: where the cache is when it is complete.
        growing: where it is until then.
        vocab_size: of the tokenizer.
        writer: of this cache.
    """

    def __init__(self, folder: Path, growing: Path, *, vocab_size: int, writer: Writer = NO_WRITER) -> None:
        self._folder, self._growing, self._writer = folder, growing, writer
        self._dtype = token_dtype(vocab_size)
        self.journal = Journal(folder)
        self._maps: dict[SplitName, npt.NDArray[Any]] = {}
        self._there: dict[SplitName, tuple[int, int]] = {}
        self._told: Wanted | None = None
        self._validation = 0

    @property
    def current(self) -> Path:
        """Where it is now."""
        return self._folder if (self._folder / "meta.json").is_file() else self._growing

    @property
    def num_tokens(self) -> int | None:
        """Of the training stream; None until its last part was tokenized."""
        return None if self.journal.last is None else self.journal.last.end.train

    def want(self, *, first: int, stop: float, reopen: Place | None = None) -> None:
        """Let the writer go on to these training tokens."""
        wanted = Wanted(self._validation, first, stop, reopen)
        if wanted != self._told:
            self._told = wanted
            self._writer.tell(wanted)

    def wait_for_validation(self, stop: int) -> int:
        """As many held-out tokens, or all there are. Returns how many."""
        self._validation = stop
        self.want(first=0, stop=1)
        return self.wait("validation", 0, stop)

    def wait(self, split: SplitName, first: int, stop: int) -> int:
        """Until tokens `first` to `stop` are there, or all up to the end of the stream.

        Returns:
            `stop`, or the end of the stream if that is before it.

        Raises:
            ValueError, OSError, PreparedDataError: there will be no more.
        """
        pause, started, told = _SHORTEST_WAIT, time.monotonic(), 0.0
        while (end := self._end(split, first, stop)) is None:
            try:
                self._writer.raise_problem()
            except (ValueError, OSError, PreparedDataError):
                # What came right before it, or one rank would go on that looked later.
                if (end := self._end(split, first, stop)) is not None:
                    return end
                raise
            self._writer.look()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT)
            waited = time.monotonic() - started
            if waited - told > _LOG_SECONDS:
                told = waited
                log.info("waiting for tokens of %s since %.0f s", self._folder.name, waited)
        return end

    def _end(self, split: SplitName, first: int, stop: int) -> int | None:
        start, end = self._there.get(split, (0, 0))
        if start <= first and stop <= end:  # asked in every micro-step, and a journal has many parts
            return stop
        for is_new in (False, True):
            if is_new:
                self.journal.path = self.current / self.journal.path.name
                self.journal.refresh()
            end = self.journal.contiguous(split, first)
            last = self.journal.last
            total = None if last is None else int(getattr(last.end, split))
            if end >= stop or end == total:
                self._there[split] = (first, end)
                return min(stop, end)
        return None

    def blocks(self, split: SplitName, items: npt.NDArray[np.int64], sequence_length: int) -> npt.NDArray[Any]:
        """[B, T] ids of blocks that are there."""
        stop = (int(items.max(initial=-1)) + 1) * sequence_length
        known = self._maps.get(split)
        if known is None or len(known) < stop:
            self._maps[split] = known = self._map(split)
        return known[:stop].reshape(-1, sequence_length)[items]

    def _map(self, split: SplitName) -> npt.NDArray[Any]:
        try:
            path = regular(self.current / f"{split}.bin")
        except FileNotFoundError:  # the folder has become complete in this moment
            path = regular(self.current / f"{split}.bin")
        size = path.stat().st_size // self._dtype.itemsize
        return np.memmap(regular(path), dtype=self._dtype, mode="r", shape=(size,))
