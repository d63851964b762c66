"""Rounds of holder sets: what one holds, how many there are, and how evenly pairs share."""

from __future__ import annotations

import hashlib
from math import gcd

import numpy as np
import pytest

from sdp_deepspeed.plan.assignment.graph import to_holders
from sdp_deepspeed.plan.assignment.rounds import find_rounds
from sdp_deepspeed.plan.spectral_gap import spectral_gap
from tests.helpers.properties import large

COUNTS = [(7, 3), (8, 4), (8, 5), (9, 3), (10, 4), (12, 3), (12, 8), (16, 12), (20, 10)]


@pytest.mark.parametrize(("k", "p"), [*COUNTS, large(64, 32), large(64, 24), large(256, 64)])
def test_a_round_holds_all_equally_often(k: int, p: int) -> None:
    rounds = find_rounds(k, p)
    n, e, _ = rounds.shape
    assert e == k // gcd(k, p)
    assert n * e <= 4 * k
    assert (rounds.sum(axis=2) == p).all()
    assert (rounds.sum(axis=1) == p * e // k).all()


@pytest.mark.parametrize(("k", "p", "breaks"), [(8, 3, (4,)), (8, 5, (3, 5)), (7, 3, (2, 3, 4, 5)), (16, 6, (4,))])
def test_a_round_may_end_early(k: int, p: int, breaks: tuple[int, ...]) -> None:
    rounds = find_rounds(k, p, breaks)
    for size in breaks:
        held = rounds[:, :size].sum(axis=1)
        assert set(held.flat) <= {size * p // k, -(-size * p // k)}


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 9, 12])
def test_any_sets_of_disjoint_ones_hold_equally_often(p: int) -> None:
    """Sets that do not overlap, or whose complements do not, need no breaks."""
    rounds = find_rounds(12 if p < 12 else 16, p)
    times = rounds.sum(axis=1)
    if p in (8, 9, 12):
        times = rounds.shape[1] - times
    assert (times == 1).all()


@pytest.mark.parametrize(
    ("k", "p"), [(7, 3), (8, 4), (8, 6), (9, 3), (9, 6), (10, 5), (12, 3), (12, 4), (12, 6), (12, 9), (16, 4), (16, 8)]
)
def test_all_pairs_share_equally_often(k: int, p: int) -> None:
    """So that the bound of the spectral gap is reached."""
    sets = find_rounds(k, p).reshape(-1, k)
    assert len({int(count) for count in (sets.T @ sets)[~np.eye(k, dtype=bool)]}) == 1
    assert spectral_gap(to_holders(sets), [1] * len(sets), k) == pytest.approx(k * (p - 1) / (p * (k - 1)))


def test_known_rounds_stay() -> None:
    """Platforms and releases must agree on them. The first are turned, the others searched for one by one."""
    digests = [hashlib.sha256(find_rounds(k, p).tobytes()).hexdigest()[:12] for k, p in ((20, 5), (8, 3), (16, 6))]
    assert digests == ["a38a93d9bb7c", "c4faeb81fbd4", "de3b59a8a8ba"]


def test_rounds_cannot_be_changed() -> None:
    """They are kept for the next model."""
    with pytest.raises(ValueError, match="read-only"):
        find_rounds(8, 4)[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        find_rounds(8, 6)[0, 0, 0] = 1
