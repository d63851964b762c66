"""Orders of n items that are computed, not stored."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.data.shuffle import shuffled
from tests.helpers.properties import examples


def _order(num_items: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(num_items), num_items=num_items, seed=seed, epoch=epoch).tolist()


@given(st.integers(1, 700), st.integers(0, 2**63 - 1), st.integers(0, 5))
@examples(60)
def test_every_epoch_is_a_permutation(num_items: int, seed: int, epoch: int) -> None:
    assert sorted(_order(num_items, seed, epoch)) == list(range(num_items))


def test_orders_differ_by_seed_and_epoch_and_look_random() -> None:
    orders = [_order(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for a, b in itertools.combinations([*orders, list(range(1000))], 2):
        # Two random orders of 1000 share one place on average (Poisson): ten would be a sign of structure.
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 10
    for order in orders:
        # Spearman's correlation with the place has a deviation of 1/sqrt(999): 0.15 is almost five of them.
        assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.15


def _mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def _slow_item(position: int, num_items: int, seed: int, epoch: int) -> int:
    """The same permutation in Python's own integers, which overflow nowhere."""
    start = _mixed((_mixed(seed) + epoch) % 2**64)
    keys = [_mixed((start + step * 0x9E3779B97F4A7C15) % 2**64) for step in range(1, 9)]
    half = max(1, -(-(num_items - 1).bit_length() // 2))
    while True:
        left, right = position >> half, position % 2**half
        for key in keys:
            left, right = right, left ^ _mixed(right ^ key) % 2**half
        position = left << half | right
        if position < num_items:
            return position


@pytest.mark.parametrize("num_items", [1, 2, 10, 4096, 2**40 - 3])
def test_order_is_that_of_plain_integer_arithmetic(num_items: int) -> None:
    """Hence the same on every platform and NumPy release, and for one position as among others."""
    positions = sorted({0, num_items // 3, num_items // 2, num_items - 1})
    for seed, epoch in [(0, 0), (7, 3), (2**63 - 1, 2)]:
        fast = shuffled(np.array(positions), num_items=num_items, seed=seed, epoch=epoch)
        assert fast.tolist() == [_slow_item(position, num_items, seed, epoch) for position in positions]


def test_of_nothing_is_refused() -> None:
    """The walk for an item that there is not would never end."""
    with pytest.raises(AssertionError, match="never end"):
        shuffled(np.arange(1), num_items=0, seed=0, epoch=0)
    assert len(shuffled(np.arange(0), num_items=0, seed=0, epoch=0)) == 0
