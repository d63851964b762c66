"""The streams that are written are the plain tokenizer's, however often and wherever the writer was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.data import row_groups
from sdp_deepspeed.data.journal import JOURNAL, Journal
from sdp_deepspeed.data.parts import capped
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.stream_writer import STAGING, Wanted
from sdp_deepspeed.data.workers import Workers
from tests.helpers.properties import examples
from tests.helpers.streams import Demand, SmallStream, Stopped, small_stream


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> SmallStream:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_groups, "PART_BYTES", 1)
        found = small_stream(tmp_path_factory.mktemp("stream"))
    assert len(found.parts) == 12
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "growing"


def test_the_stream_is_the_plain_tokenizers(stream: SmallStream, target: Path) -> None:
    demand = Demand(Wanted())
    stream.writer(target).write(demand, on_part=demand.on_part)
    assert stream.written(target) == stream.expected()
    assert demand.counted == list(range(12))
    assert not (target / STAGING).exists()


def test_the_number_of_processes_changes_nothing(stream: SmallStream, target: Path) -> None:
    with Workers(stream.setup, 2).running() as workers:
        stream.writer(target, workers).write(Wanted, on_part=Demand().on_part)
    assert stream.written(target) == stream.expected()


class StoppedAfter(Demand):
    """As a kill right after some part."""

    def __init__(self, count: int) -> None:
        super().__init__(Wanted())
        self.count = count

    def __call__(self) -> Wanted:
        if len(self.counted) >= self.count:
            raise Stopped
        return self.wanted


@given(st.lists(st.integers(1, 5), max_size=4), st.binary(max_size=30))
@examples(40)
def test_goes_on_where_it_was_stopped(
    stream: SmallStream, tmp_path_factory: pytest.TempPathFactory, stops: list[int], torn: bytes
) -> None:
    target = tmp_path_factory.mktemp("stopped") / "growing"
    done: list[int] = []
    for count in stops:
        before = len(_journal(target)) if target.exists() else 0
        demand = StoppedAfter(count)
        try:
            stream.writer(target).write(demand, on_part=demand.on_part)
        except Stopped:
            for name in ("train.bin", JOURNAL):  # a write that was cut
                with (target / name).open("ab") as file:
                    file.write(torn.replace(b"\n", b""))
        done = demand.counted
        assert not done or done[0] == before, "what the journal has is not done again"
    stream.writer(target).write(Wanted, on_part=Demand().on_part)
    assert stream.written(target) == stream.expected()
    assert _journal(target).is_complete


def _journal(target: Path) -> Journal:
    journal = Journal(target)
    journal.refresh()
    return journal


class Impatient(Demand):
    """Ends a writer that has nothing to do."""

    idle = 0

    def __call__(self) -> Wanted:
        self.idle += 1
        if self.idle > 30:
            raise Stopped
        return self.wanted


def test_no_more_is_written_than_is_wanted(stream: SmallStream, target: Path) -> None:
    demand = Impatient(Wanted(first=0, stop=1))
    with pytest.raises(Stopped):
        stream.writer(target).write(demand, on_part=demand.on_part)
    assert demand.counted == [0]
    held_out = stream.expected()["validation"]
    demand = Impatient(Wanted(validation=len(held_out) // 2, first=0, stop=1))
    with pytest.raises(Stopped):
        stream.writer(target).write(demand, on_part=demand.on_part)
    journal = _journal(target)
    assert journal.contiguous("validation", 0) >= len(held_out) // 2
    assert journal.contiguous("validation", 0) < len(held_out)


def test_a_lost_cache_is_written_from_where_the_run_was(stream: SmallStream, tmp_path: Path) -> None:
    """At the places where the tokens were, without what is before them; that comes when it is wanted."""
    whole = tmp_path / "whole"
    stream.writer(whole).write(Wanted, on_part=Demand().on_part)
    place = _journal(whole).place_of(len(stream.expected()["train"]) // 2)
    assert place is not None
    assert place.part > 3
    target = tmp_path / "growing"
    wanted = Wanted(first=place.train + 3, stop=place.train + 5, reopen=place)
    demand = Impatient(wanted)
    with pytest.raises(Stopped):
        stream.writer(target).write(demand, on_part=demand.on_part)
    assert demand.counted == [place.part]
    entry = _journal(target).get(place.part)
    assert entry == _journal(whole).get(place.part)
    assert entry is not None
    start, stop = entry.place.train, entry.end.train
    assert stream.written(target)["train"][start:stop] == stream.expected()["train"][start:stop]
    rest = Demand(Wanted())
    stream.writer(target).write(rest, on_part=rest.on_part)
    assert stream.written(target) == stream.expected()
    assert sorted(rest.counted) == [part for part in range(12) if part != place.part]


def test_text_that_changed_since_is_told(stream: SmallStream, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    stream.writer(whole).write(Wanted, on_part=Demand().on_part)
    place = _journal(whole).place_of(len(stream.expected()["train"]) // 2)
    assert place is not None
    moved = type(place)(place.part, place.train + 1, place.validation, place.bytes)
    target = tmp_path / "growing"
    demand = Impatient(Wanted(first=moved.train, stop=moved.train + 1, reopen=moved))
    with pytest.raises(Stopped):
        stream.writer(target).write(demand, on_part=demand.on_part)
    with pytest.raises(PreparedDataError, match=f"the text has changed since it was tokenized. Delete {target}"):
        stream.writer(target).write(Wanted, on_part=Demand().on_part)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999, 1.0, 2.0])
@pytest.mark.parametrize("exactly", [0, 1])
def test_max_bytes_is_counted_in_the_stream(stream: SmallStream, target: Path, share: float, exactly: int) -> None:
    documents = stream.documents()
    sizes = [len(text.encode()) for text in documents]
    limit = sum(sizes[: int(len(sizes) * share)]) + exactly
    writer = stream.writer(target, max_bytes=limit)
    writer.write(Wanted, on_part=Demand().on_part)
    kept = list(capped(documents, limit))
    assert stream.written(target) == stream.expected(kept)
    counts = writer.journal.counts()
    assert counts["train"].documents + counts["validation"].documents == len(kept)
