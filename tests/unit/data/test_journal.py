"""The journal: what is known of the streams, also with gaps, torn lines and lines of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.data.journal import JOURNAL, Entry, Journal, Place
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.tokenize_part import SplitCount
from tests.helpers.properties import examples


def _entries(tokens: list[int]) -> list[Entry]:
    """Parts with so many training tokens, and one held-out token each."""
    entries = []
    place = Place(0, 0, 0, 0)
    for number, count in enumerate(tokens):
        is_last = number == len(tokens) - 1
        entries.append(Entry(place, SplitCount(1, 4 * count, count), SplitCount(1, 4, 1), is_last))
        place = entries[-1].end
    return entries


def _journal(folder: Path, entries: list[Entry]) -> Journal:
    writer = Journal(folder)
    writer.refresh()
    for entry in entries:
        writer.add(entry)
    writer.append(entries)
    reader = Journal(folder)
    reader.refresh()
    return reader


def test_what_is_there_without_a_gap(tmp_path: Path) -> None:
    entries = _entries([10, 0, 5, 7, 0, 3])
    journal = _journal(tmp_path, [entries[0], entries[1], entries[4], entries[3]])
    assert journal.contiguous("train", 0) == 10
    assert journal.contiguous("train", 10) == 10
    assert journal.contiguous("train", 12) == 12, "nothing is there"
    assert journal.contiguous("train", 15) == 22
    assert journal.contiguous("validation", 0) == 2
    assert journal.contiguous("validation", 3) == 5
    assert journal.place_of(16) == entries[3].place
    assert journal.place_of(12) is None
    assert not journal.is_complete
    more = _journal(tmp_path, [entries[5]])
    assert more.last == entries[5]
    assert not more.is_complete
    whole = _journal(tmp_path, [entries[2]])
    assert whole.is_complete
    assert whole.contiguous("train", 0) == 25
    assert whole.counts()["train"] == SplitCount(6, 100, 25)


@given(st.permutations(range(8)), st.integers(0, 8))
@examples(40)
def test_parts_in_any_order_leave_the_gaps_that_a_walk_finds(order: list[int], count: int) -> None:
    entries, there = _entries([3, 0, 2, 0, 0, 4, 1, 2]), order[:count]
    journal = Journal(Path("absent"))
    for part in there:
        journal.add(entries[part])
        journal.add(entries[part])  # as a refresh does with what this process has added
    assert journal.is_complete == (count == 8)
    for first in range(9):
        assert journal.first_missing(first) == next(part for part in range(first, 10) if part not in there)
    for token in range(13):
        holding = [part for part in there if entries[part].place.train <= token <= entries[part].end.train]
        place = max(holding, default=None)
        end = place
        while end is not None and end + 1 in there:
            end += 1
        assert journal.contiguous("train", token) == (token if end is None else max(token, entries[end].end.train))
        assert journal.place_of(token) == (None if place is None else entries[place].place)


class _Counted(dict[int, Entry]):
    """Entries that count how often somebody looks at one."""

    looks = 0

    def __getitem__(self, part: int) -> Entry:
        self.looks += 1
        return super().__getitem__(part)

    def __contains__(self, part: Any) -> bool:
        self.looks += 1
        return super().__contains__(part)


def test_a_question_does_not_walk_over_all_parts() -> None:
    """A writer asks three for each part, and a corpus has hundreds of thousands."""
    journal = Journal(Path("absent"))
    for entry in _entries([10] * 2000):
        journal.add(entry)
    journal._entries = counted = _Counted(journal._entries)
    assert journal.first_missing(0) == 2000
    assert journal.contiguous("train", 0) == 20_000
    assert journal.contiguous("validation", 0) == 2000
    assert journal.place_of(9_995) == _entries([10] * 2000)[999].place
    assert counted.looks < 100


def test_reads_on_and_leaves_what_is_not_whole(tmp_path: Path) -> None:
    entries = _entries([10, 5])
    journal = _journal(tmp_path, entries[:1])
    line = entries[1].line().encode()
    path = tmp_path / JOURNAL
    with path.open("ab") as file:
        file.write(line[:20])
    journal.refresh()
    assert len(journal) == 1
    with path.open("ab") as file:
        file.write(line[20:])
    journal.refresh()
    assert len(journal) == 2
    assert journal.get(1) == entries[1]


def test_no_journal_is_an_empty_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "absent")
    journal.refresh()
    assert (len(journal), journal.contiguous("train", 0), journal.place_of(0)) == (0, 0, None)


@pytest.mark.parametrize("line", [b"{}", b"[]", b"\xff", b'{"place": 1}', b"[" * 100_000])
def test_lines_of_others_are_told_with_what_to_do(tmp_path: Path, line: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(line + b"\n")
    with pytest.raises(PreparedDataError, match=rf"{tmp_path / JOURNAL} cannot be read .*: delete {tmp_path}"):
        Journal(tmp_path).refresh()
