"""What is said of the others: who is named, when, and with what they did before they ended."""

from __future__ import annotations

from typing import Any

import pytest

from sdp_deepspeed.distributed import last_acts
from tests.helpers.last_acts import of_ranks, threads, waiting

pytestmark = pytest.mark.slow


def test_nobody_warns_in_the_first_minute() -> None:
    said: list[str] = []
    zero, _ = of_ranks(2, said)

    class Slow:
        def wait(self, *_: Any) -> None:
            zero.look()

    zero.wait(Slow(), 1, in_slices=False)
    assert said == []


def test_ranks_in_another_collective_of_the_same_number_are_named() -> None:
    zero, one, two = of_ranks(3)
    for rank, what in ((zero, "began its step"), (one, "began its backward pass"), (two, "began its step")):
        rank.note(what)
        with waiting(rank, 4):
            rank.publish()
    with waiting(zero, 4):
        text = zero.explain()
    assert "for rank 1, which began its backward pass and had waited" in text
    assert "rank 2" not in text


def test_the_last_act_before_the_process_ends_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_acts, "BEAT_SECONDS", 60.0)
    monkeypatch.setattr(last_acts, "_LAST_BEAT_SECONDS", 10.0)
    zero, one = of_ranks(2)
    before = threads()
    one.start()
    [thread] = threads() - before
    one.note("ended its step")
    last_acts._end(one._stop, thread)
    assert "for rank 1, which ended its step" in zero.explain()
