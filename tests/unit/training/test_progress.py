"""What a user sees of a run, from one rank only."""

from __future__ import annotations

import io
import sys
import time

import pytest

from sdp_deepspeed.training.progress import Progress, memory_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("show", [True, False])
def test_one_rank_shows_lines_and_a_bar(
    show: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(first=3, total=5, show=show) as progress:
        progress.say("starting")
        for _ in range(2):
            progress.step(1.5, 1000.0)
    assert capsys.readouterr().out == ("starting\n" if show else "")
    shown = terminal.getvalue()
    assert ("5/5" in shown) == show
    assert ("loss=1.500, tok/s=1000, memory=" in shown) == show
    assert ("\r" in shown) == show


@pytest.mark.parametrize("show", [True, False])
def test_without_a_terminal_there_are_lines(
    show: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes four seconds here, the first 44: it has a line, the fourth, and the last."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Progress(first=100, total=106, show=show) as progress:
        for index in range(6):
            now += 4 if index else 44
            progress.step(1.0 + index, 50.0)
    lines = capsys.readouterr().err.splitlines()
    if not show:
        assert lines == []
        return
    assert [line.partition(", tok/s=50, memory=")[0] for line in lines] == [
        "step 101/106: loss=1.000",
        "step 104/106: loss=4.000",
        "step 106/106: loss=6.000",
    ]
    assert "left" not in lines[0], "a first step says nothing of the others"
    assert [line.rpartition(", ")[2] for line in lines[1:]] == ["0:00:08 left", "0:00:00 left"]


class ReaderIsGone(io.StringIO):
    """What standard output becomes when Ctrl-C also ends the `tee` that reads it."""

    num_writes = 0

    def write(self, text: str) -> int:
        self.num_writes += 1
        raise BrokenPipeError


def test_a_reader_that_is_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, ReaderIsGone())
    with Progress(first=0, total=1, show=True) as progress:
        progress.say("starting")
        progress.step(1.0, 1.0)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, ReaderIsGone)
        assert stream.num_writes, "it was tried, and the error went no further"


def test_memory_of_this_process() -> None:
    assert memory_bytes() > 10 * 2**20
