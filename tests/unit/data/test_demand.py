"""Two jobs on one cache: the one that writes serves the other, as long as that lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sdp_deepspeed.data import DataConfig, build, demand, row_groups
from sdp_deepspeed.data.demand import DemandOfOthers, waiting_for
from sdp_deepspeed.data.journal import Place
from sdp_deepspeed.data.prepare import prepare
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.stream_writer import Wanted
from tests.helpers.own_processes import own_processes
from tests.helpers.streams import Demand, SmallStream, Stopped, small_stream


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "_SECONDS_BETWEEN_LOOKS", 0.0)


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallStream:
    monkeypatch.setattr(row_groups, "PART_BYTES", 1)
    return small_stream(tmp_path / "stream")


def test_what_waits_is_seen_while_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data-0"
    others = DemandOfOthers(folder)
    assert others() == []
    with waiting_for(folder) as say:
        for wanted in (Wanted(), Wanted(3, 4, 5.0, Place(1, 2, 3, 4))):
            say(wanted)
            assert others() == [wanted]
        (path,) = tmp_path.iterdir()
        os.utime(path, (1, 1))
        assert others() == [wanted], "clocks of machines differ"
        monkeypatch.setattr(demand, "_DEAD_SECONDS", -1.0)
        assert others() == [], "it gave no sign of life"
        say(wanted)
        assert others() == [wanted]
    assert list(tmp_path.iterdir()) == []
    assert others() == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"reopen": {}}', b'{"reopen": null, "last": 3}', b"\xff"])
def test_what_is_none_of_ours_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".data-0.wanted.x.1").write_bytes(content)
    assert DemandOfOthers(tmp_path / "data-0")() == []


class Impatient(Demand):
    """Ranks that want one part and never more; the test ends when nothing else is done for long."""

    num_calls = 0

    def __call__(self) -> Wanted:
        self.num_calls += 1
        if self.num_calls > 100:
            raise Stopped
        return self.wanted


def test_the_one_that_writes_serves_another_job(stream: SmallStream, tmp_path: Path) -> None:
    own, others = Impatient(Wanted(stop=1)), DemandOfOthers(tmp_path / "data-0")
    with waiting_for(tmp_path / "data-0") as say:
        say(Wanted())
        stream.writer(tmp_path / "growing").write(own, on_part=own.on_part, others=others)
    assert stream.written(tmp_path / "growing") == stream.expected()
    with pytest.raises(Stopped):
        stream.writer(tmp_path / "alone").write(Impatient(Wanted(stop=1)), on_part=own.on_part, others=others)


def test_preparing_is_served_by_training(tmp_path: Path) -> None:
    """Two programs: one trains, and needs no more; the other prepares the same text before it trains."""
    small_stream(tmp_path, shards=12)  # one worker has three at once
    settings: dict[str, Any] = {"source": "files", "path": str(tmp_path / "mirror"), "workers": 1}
    settings |= {"vocab_size": 300, "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    during = DataConfig(**settings, sequence_length=4, tokenize="during", validation_blocks=1, shuffle_window=1)
    bundle = build(during, micro_batch=1)
    next(bundle.train)
    try:
        folder = prepare(DataConfig(**settings))
    finally:
        for process in own_processes("sdp_deepspeed.data.background"):
            process.kill()
    assert PreparedData.load(folder).identity == bundle.prepared.identity
