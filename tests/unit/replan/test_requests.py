"""Requests between ranks, which are threads here: each rank gets what it must serve, in order, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.replan.requests import Questions, Request
from tests.helpers.gatherers import Alone, outcomes_of
from tests.helpers.properties import examples
from tests.helpers.threads import Ranks

SIZE = 3
RANKS = Ranks(SIZE)
KEYS = {"weight/number": 0, "weight/line": 1, "master/line": 1, "weight/plane": 2}
CPU = torch.device("cpu")


@st.composite
def requests(draw: st.DrawFn) -> Request:
    key = draw(st.sampled_from(list(KEYS)))
    sizes = st.tuples(*[st.integers(0, 2**40)] * KEYS[key])
    return Request(key, draw(sizes), Box(draw(sizes), draw(sizes)))


OF_RANKS = st.dictionaries(st.integers(0, SIZE - 1), st.lists(requests(), max_size=6))


@given(st.tuples(*[OF_RANKS] * SIZE), st.lists(st.integers(-5, 5), min_size=SIZE, max_size=SIZE))
@examples(20)
def test_each_rank_gets_its_own(asked: Sequence[dict[int, list[Request]]], numbers: list[int]) -> None:
    for group in RANKS.groups:
        group.sent.clear()

    def work(rank: int, objects: Any) -> tuple[list[list[Request]], list[int], int]:
        questions = Questions(Communicator(RANKS.groups[rank]), device=CPU, keys=sorted(KEYS))
        found = questions.exchange(asked[rank])
        return found, questions.numbers([numbers[rank] * other for other in range(SIZE)]), questions.sent_bytes

    for rank, (found, told, sent_bytes) in enumerate(outcomes_of(SIZE, work)):
        assert found == [of_rank.get(rank, []) for of_rank in asked]
        assert told == [number * rank for number in numbers]
        lengths, message, _ = RANKS.groups[rank].sent
        assert lengths == SIZE
        assert sent_bytes <= 2 * 8 * (SIZE - 1) + message


def test_a_message_is_as_long_as_what_one_rank_asks() -> None:
    """Not as what all ask: requests that others serve do not come by."""
    asked = {1: [Request("weight/plane", (0, 0), Box((row, 0), (1, 4))) for row in range(5000)]}
    for group in RANKS.groups:
        group.sent.clear()

    def work(rank: int, objects: Any) -> int:
        questions = Questions(Communicator(RANKS.groups[rank]), device=CPU, keys=sorted(KEYS))
        return sum(map(len, questions.exchange(asked if rank == 0 else {})))

    assert outcomes_of(SIZE, work) == [0, 5000, 0]
    sent = [group.sent[1] for group in RANKS.groups]
    assert 5000 * 6 * 2 < sent[0] < 5000 * 6 * 2 + 500
    assert sent[1:] == [0, 0]


def test_one_rank() -> None:
    questions = Questions(Communicator(Alone()), device=CPU, keys=[])
    assert questions.exchange({}) == [[]]
    assert questions.numbers([7]) == [7]
    assert questions.sent_bytes == 0
