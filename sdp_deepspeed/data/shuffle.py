"""A seeded order of n items, computed per item instead of stored.

A stored permutation costs 8 bytes per block on every rank (8 GB at a billion blocks), and NumPy does not
promise the same one from release to release, so that a resumed run could see blocks twice. A Feistel
network over integers gives a permutation of the next even power of two without any table; values past n
are sent through it again until they fall below n ("cycle walking"), which keeps it one-to-one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

# Four rounds are the known minimum for a Feistel network to look random; small domains want a few more.
_NUM_ROUNDS = 8


def _mix(values: UInt64s) -> UInt64s:
    """Scatter 64-bit integers (the finalizer of SplitMix64; arithmetic modulo 2**64 is meant)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> UInt64s:
    start = _mix(_mix(np.array([seed], dtype=np.uint64)) + np.array([epoch], dtype=np.uint64))
    steps = np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(start + steps)


def shuffled(positions: npt.NDArray[Any], *, num_items: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Which item stands at each of `positions` in this epoch's order.

    Args:
        positions: [B] integers in 0..num_items-1.
        num_items: n; positions 0..n-1 map one-to-one onto items 0..n-1.
        seed: any non-negative integer below 2**63; other seeds and epochs give other orders.

    Returns:
        [B] items, the same on every platform.
    """
    assert num_items > 0 or len(positions) == 0, "walking to an item that there is not would never end"
    half = np.uint64(max(1, (max(num_items - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = _round_keys(seed, epoch)
    items: UInt64s = positions.astype(np.uint64)
    outside = np.ones(items.shape, dtype=bool)
    while outside.any():
        left, right = items[outside] >> half, items[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        items[outside] = (left << half) | right
        outside = items >= np.uint64(num_items)
    return items.astype(np.int64)


def uniform(positions: npt.NDArray[Any], count: int, *, seed: int) -> npt.NDArray[np.float64]:
    """Numbers that look random, from the positions alone.

    Args:
        positions: [B] non-negative integers.
        count: numbers for each.
        seed: any non-negative integer below 2**63.

    Returns:
        [B, count] in [0, 1), the same on every platform.
    """
    keys = _mix(np.array([seed], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1))
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    rows = _mix(positions.astype(np.uint64) + keys)
    numbers = _mix(rows[:, None] + steps[None, :]) >> np.uint64(11)
    return numbers.astype(np.float64) * 2.0**-53
