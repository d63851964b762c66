"""What a growing cache holds: for each part of the stream that was tokenized, where its tokens are.

`parts.jsonl` gets a line when a part's tokens are on the disk. So whoever reads it may use them at once, a killed
writer goes on where it was, and one that has lost its disk begins at the part where a run stands (`Place`), not at the
first.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sdp_deepspeed.atomic_files import regular, sync
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.tokenize_part import SPLITS, SplitCount, SplitName

JOURNAL = "parts.jsonl"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of the stream begins.

    Args:
        part: its number in the stream.
        train, validation: tokens of each split before it.
        bytes: of text before it.
    """

    part: int
    train: int
    validation: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A part that was tokenized.

    Args:
        place: where it begins.
        train, validation: what it holds.
        is_last: nothing comes after it.
    """

    place: Place
    train: SplitCount
    validation: SplitCount
    is_last: bool

    @property
    def end(self) -> Place:
        """Where the next part begins."""
        begins = self.place
        return Place(
            begins.part + 1,
            begins.train + self.train.tokens,
            begins.validation + self.validation.tokens,
            begins.bytes + self.train.bytes + self.validation.bytes,
        )

    def line(self) -> str:
        """As it is in the journal."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str) -> Entry:
        """From its line; KeyError, TypeError or ValueError for what is none."""
        values = json.loads(line)
        counts = {split: SplitCount(**values[split]) for split in SPLITS}
        return cls(Place(**values["place"]), counts["train"], counts["validation"], bool(values["is_last"]))


class Journal:
    """The entries of a folder, as far as they were read. Reading goes on where it was."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._entries: dict[int, Entry] = {}
        self._runs: list[range] = []  # of parts without a gap, sorted: walking over single parts would take hours
        self._read_bytes = 0
        self.last: Entry | None = None

    def refresh(self) -> None:
        """Read what has come. A line without its end is still being written.

        Raises:
            PreparedDataError: a line is none of ours.
        """
        try:
            with open(regular(self.path), "rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
        except FileNotFoundError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                self.add(Entry.read(line.decode("utf-8")))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise PreparedDataError(f"{self.path} cannot be read ({error!r}): delete {self.path.parent}") from None
        self._read_bytes += len(whole)

    def append(self, entries: Sequence[Entry]) -> None:
        """Write lines, of the one writer, who has added them already; what is torn at the end is overwritten."""
        content = "".join(entry.line() for entry in entries).encode("utf-8")
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(handle, self._read_bytes)
            os.pwrite(handle, content, self._read_bytes)
        finally:
            os.close(handle)
        sync(self.path)
        self._read_bytes += len(content)

    def add(self, entry: Entry) -> None:
        """Know of a part, before others do."""
        part = entry.place.part
        if part not in self._entries:
            self._insert(part)
        self._entries[part] = entry
        if entry.is_last:
            self.last = entry

    def _insert(self, part: int) -> None:
        """Into the runs, two of which it may join."""
        start, stop = part, part + 1
        after = self._num_runs_until(part)
        if after < len(self._runs) and self._runs[after].start == stop:
            stop = self._runs.pop(after).stop
        if after and self._runs[after - 1].stop == start:
            after -= 1
            start = self._runs.pop(after).start
        self._runs.insert(after, range(start, stop))

    def _num_runs_until(self, part: int) -> int:
        """How many begin at `part` or before it."""
        return bisect.bisect_right(self._runs, part, key=lambda run: run.start)

    def first_missing(self, part: int) -> int:
        """The first one from `part` on that is not there."""
        runs = self._num_runs_until(part)
        return max(part, self._runs[runs - 1].stop) if runs else part

    def __contains__(self, part: int) -> bool:
        return part in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, part: int) -> Entry | None:
        """A part's, if it was tokenized."""
        return self._entries.get(part)

    @property
    def is_complete(self) -> bool:
        """Whether all parts were tokenized. None is there after the last one."""
        return self.last is not None and self._runs == [range(self.last.place.part + 1)]

    def counts(self) -> dict[SplitName, SplitCount]:
        """Of all entries."""
        total: dict[SplitName, SplitCount] = {split: SplitCount() for split in SPLITS}
        for entry in self._entries.values():
            total["train"] += entry.train
            total["validation"] += entry.validation
        return total

    def contiguous(self, split: SplitName, start: int) -> int:
        """Tokens of a split that are there from `start` on without a gap, as the place where they end."""
        part = self._part_of(split, start)
        if part is None:
            return start
        return max(start, int(getattr(self._entries[self.first_missing(part) - 1].end, split)))

    def place_of(self, token: int) -> Place | None:
        """The part that holds a training token, or the first one after it; None where that is not known."""
        part = self._part_of("train", token)
        return None if part is None else self._entries[part].place

    def _part_of(self, split: SplitName, token: int) -> int | None:
        """The one that holds `token`, or ends right before it."""

        def begin(part: int) -> int:
            return int(getattr(self._entries[part].place, split))

        runs = bisect.bisect_right(self._runs, token, key=lambda run: begin(run.start))
        if not runs:
            return None
        run = self._runs[runs - 1]
        part = run[bisect.bisect_right(run, token, key=begin) - 1]
        return part if token <= int(getattr(self._entries[part].end, split)) else None
