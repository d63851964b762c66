"""What a user sees of a run, from one rank only."""

from __future__ import annotations

import io
import sys

import pytest

from sdp_deepspeed.training.progress import Progress, memory_bytes


@pytest.mark.parametrize("show", [True, False])
def test_one_rank_shows_lines_and_a_bar(show: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(first=3, total=5, show=show) as progress:
        progress.say("starting")
        for _ in range(2):
            progress.step(1.5, 1000.0)
    printed = capsys.readouterr()
    assert printed.out == ("starting\n" if show else "")
    assert ("5/5" in printed.err) == show
    assert ("loss=1.500, tok/s=1000, memory=" in printed.err) == show


class ReaderIsGone(io.StringIO):
    """What standard output becomes when Ctrl-C also ends the `tee` that reads it."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        raise BrokenPipeError


def test_a_reader_that_is_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ReaderIsGone()
    monkeypatch.setattr(sys, "stdout", gone)
    with Progress(first=0, total=1, show=True) as progress:
        progress.say("starting")
    assert gone.num_writes, "it was tried, and the error went no further"


def test_memory_of_this_process() -> None:
    assert memory_bytes() > 10 * 2**20
