"""Which parts are fetched in a pass, in which order, and what is there at a time."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from sdp_deepspeed.exchange.exchange import Steps
from sdp_deepspeed.masking.part import DenseTensors
from sdp_deepspeed.masking.part_stream import PartStream, Targets

NUM_PARTS = 4


class Fetches:
    """Fetches that are written down: "0" begins, "0." is there; `fails` names one that breaks."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.events: list[str] = []
        self.agreed: list[tuple[int, int, bool]] = []
        self.rounds: set[int] = set()
        self.parts = [mock.Mock(allocate=lambda: DenseTensors({})) for _ in range(NUM_PARTS)]
        self.stream = PartStream(self.parts, self.fetch, agree=self.agreed.append, device=torch.device("cpu"))

    def fetch(self, index: int, targets: Targets, num_rounds: int) -> Steps:
        self.rounds.add(num_rounds)
        self.note(f"{index}")
        yield
        targets()
        self.note(f"{index}.")

    def note(self, event: str) -> None:
        if event == self.fails:
            raise ConnectionError
        self.events.append(event)

    def run(self, order: Sequence[int], *, keeps: bool = False, ahead: bool = True) -> str:
        self.events.clear()
        self.stream.begin(keeps=keeps, ahead=ahead)
        for index in order:
            self.stream.take(index)
            self.events.append("runs")
        self.stream.end()
        return " ".join(self.events)


def test_one_part_ahead() -> None:
    fetches = Fetches()
    assert fetches.run(range(4)) == "0 0. 1 runs 1. 2 runs 2. 3 runs 3. runs"
    assert fetches.rounds == {2}
    assert fetches.run(range(4), ahead=False) == "0 0. runs 1 1. runs 2 2. runs 3 3. runs"
    assert fetches.rounds == {1, 2}
    assert not fetches.agreed
    assert [part.complete.call_count for part in fetches.parts] == [2] * 4


@pytest.mark.parametrize("order", [[], [0], [2], [0, 3], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("ahead", [False, True])
def test_collectives_are_the_same_whatever_is_run(order: list[int], ahead: bool) -> None:
    text = Fetches().run(order, ahead=ahead).replace("runs", "").split()
    assert [event for event in text if "." in event] == ["0.", "1.", "2.", "3."]
    assert [event for event in text if "." not in event] == ["0", "1", "2", "3"]


def test_a_part_again() -> None:
    """All agree on it, knowing what is under way; without a pass nobody does."""
    fetches = Fetches()
    assert fetches.run([1, 1, 0, 2, 3, 3]).count("runs") == 6
    assert fetches.agreed == [(1, 2, True), (0, 2, True), (3, 4, False)]
    fetches.events.clear()
    fetches.stream.take(2)
    assert fetches.events == ["2", "2."]
    assert len(fetches.agreed) == 3


def test_kept() -> None:
    fetches = Fetches()
    stream = fetches.stream
    assert fetches.run([1, 2, 1], keeps=True).count(".") == 4
    assert sorted(stream.kept) == [0, 1, 2, 3]
    kept = dict(stream.kept)
    assert fetches.run([0, 1, 3, 1], keeps=True) == "runs runs runs runs"
    assert not fetches.agreed
    assert stream.kept == kept
    stream.take(0)
    assert fetches.events[-2:] == ["0", "0."], "nobody has agreed that what is kept is still right"
    assert fetches.run(range(4)).count(".") == 4
    assert not stream.kept


@pytest.mark.parametrize("fails", ["0", "0.", "2", "2."])
def test_after_an_error_nothing_of_the_pass_is_left(fails: str) -> None:
    fetches = Fetches(fails)
    with pytest.raises(ConnectionError):
        fetches.run(range(4), keeps=True)
    before = list(fetches.events)
    fetches.stream.end()
    assert fetches.events == before
    fetches.fails = ""
    fetches.stream.drop()
    assert fetches.run(range(4)) == "0 0. 1 runs 1. 2 runs 2. 3 runs 3. runs"


def test_a_gpu_fetches_on_a_stream_beside() -> None:
    """Room is made in the memory of the stream that computes; each of the two waits for the other."""
    fetches = Fetches()
    stream = PartStream(fetches.parts, fetches.fetch, agree=mock.Mock(), device=torch.device("cuda", 0))

    def told(name: str) -> mock.Mock:
        return mock.Mock(wait_stream=lambda _: fetches.note(f"{name} waits"))

    def allocate() -> DenseTensors:
        fetches.note("room")
        return DenseTensors({})

    for part in fetches.parts:
        part.allocate = allocate
        part.complete = lambda _: fetches.note("complete")
    with (
        mock.patch("torch.cuda.Stream", return_value=told("beside")) as made,
        mock.patch("torch.cuda.current_stream", return_value=told("main")),
        mock.patch("torch.cuda.stream") as entered,
    ):
        entered.return_value.__enter__.side_effect = lambda: fetches.note("(")
        entered.return_value.__exit__.side_effect = lambda *_: fetches.note(")")
        stream.begin(keeps=False, ahead=True)
        stream.take(0)
        fetches.note("runs")
        stream.take(1)
    start = "room beside waits ( {0} {0}. )"
    finish = "main waits complete"
    expected = [start.format(0), finish, start.format(1), "runs", finish, start.format(2)]
    assert " ".join(fetches.events) == " ".join(expected)
    assert made.call_count == 1


def test_an_interrupted_pass_ends_with_the_next() -> None:
    fetches = Fetches()
    fetches.stream.begin(keeps=False, ahead=True)
    fetches.stream.take(0)
    assert fetches.run([0]) == "0 0. 1 1. 2 2. 3 3. 0 0. 1 runs 1. 2 2. 3 3.".replace("0 0. 1 1.", "1.", 1)
