"""Ranks of a node keep its cores busy, and no more than there are."""

from __future__ import annotations

import pytest

from sdp_deepspeed.deferred_init.threads import MOST, num_threads, own_cores


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([range(64)] * 8, [8] * 8),
        ([range(0, 8), range(8, 16)], [8, 8]),  # bound to cores of their own
        ([range(2)] * 4, [1] * 4),
        ([range(6)] * 3, [2] * 3),
        ([range(4), range(4, 12), range(4, 12)], [4, 4, 4]),
        ([range(128)], [MOST]),
    ],
)
def test_shares(cores: list[range], expected: list[int]) -> None:
    assert [num_threads(cores, rank) for rank in range(len(cores))] == expected


def test_own_cores() -> None:
    assert own_cores()
    assert num_threads([own_cores()], 0) == min(MOST, len(own_cores()))
