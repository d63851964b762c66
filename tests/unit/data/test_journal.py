"""The journal: what is known of the streams, also with gaps, torn lines and lines of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdp_deepspeed.data.journal import JOURNAL, Entry, Journal, Place
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.tokenize_part import SplitCount


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
