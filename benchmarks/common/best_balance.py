"""The best balance that any table of units by subnetworks could have, to judge the planner by.

Units of one size are alike here, so what counts of a table is how many units of each size each subnetwork holds. Such
counts have a table if none is above the number of units of that size, and they add up to holders times units (Gale and
Ryser). So a search over counts leaves nothing out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

_MAX_STATES = 4_000_000


def best_maximum(sizes: Sequence[int], k: int, p: int) -> int | None:
    """The smallest load of the heaviest of k subnetworks, each with a unit or more, if each unit is held by p of them.

    Args:
        sizes: FLOPs of each unit.

    Returns:
        None where so many different sizes would take too long.
    """
    counts = Counter(sizes)
    totals = tuple(number * p for number in counts.values())
    if prod(total + 1 for total in totals) > _MAX_STATES:
        return None
    held = list(itertools.product(*(range(number + 1) for number in counts.values())))[1:]
    loads = [sum(size * number for size, number in zip(counts, row, strict=True)) for row in held]
    mean = -(-sum(sizes) * p // k)
    candidates = sorted({load for load in loads if load >= mean})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        rows = [row for row, load in zip(held, loads, strict=True) if load <= candidates[middle]]
        if _can_hold(rows, totals, k):
            high = middle
        else:
            low = middle + 1
    return candidates[low]


def _can_hold(rows: Sequence[Sequence[int]], totals: tuple[int, ...], k: int) -> bool:
    """Whether k of `rows`, some perhaps the same, add up to `totals`."""
    reached = np.zeros([total + 1 for total in totals], dtype=bool)
    reached[(0,) * len(totals)] = True
    for _ in range(k):
        after = np.zeros_like(reached)
        for target, source in _shifts(rows, totals):
            after[target] |= reached[source]
        reached = after
    return bool(reached[totals])


def _shifts(
    rows: Sequence[Sequence[int]], totals: tuple[int, ...]
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    for row in rows:
        if all(number <= total for number, total in zip(row, totals, strict=True)):
            pairs = list(zip(row, totals, strict=True))
            target = tuple(slice(number, None) for number, _ in pairs)
            yield target, tuple(slice(0, total + 1 - number) for number, total in pairs)
