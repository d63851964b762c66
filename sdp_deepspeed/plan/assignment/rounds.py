"""The few holder sets that a model of many units is dealt from: at most 4k, whatever the model.

Words: a round is e = k / gcd(k, p) sets of p subnetworks, [e, k], that together hold every subnetwork equally often,
p / gcd(k, p) times. So any number of rounds leaves all subnetworks with equally many units. A few rounds are searched
for in which pairs of subnetworks share as evenly as they can; each is then used again and again (`deal`).

Where e is 2, 3 or 4 (coverage 1/2, 1/3, 1/4, 2/3, 3/4), one or two rounds are searched for, and the others are these,
turned: subnetwork x becomes x + 1 modulo k - 1, and the last one stays where it is. All pairs at one distance then
share equally often, so that few numbers are left to even out; for most k up to 32 they come out equal, and the bound
of the spectral gap is reached. Other coverages would take too many turns: their rounds are searched for one by one.

All numbers are integers, also those in float64, where products of matrices are fast: below 2^53 these are exact, in
any order of summation. So every platform finds the same rounds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, pairwise
from math import gcd, sqrt

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.plan.assignment.problem import Ints

Exact = NDArray[np.float64]  # integers below 2^53

SETS_PER_SUBNETWORK = 4  # at most
_MAX_TURNED = 4  # sets of a round for which all turns of it are few enough
_MAX_TRADES = 2**19  # tried in one search, divided by the number of subnetworks
_MAX_RESTARTS = 8
_MAX_WORK = 2048  # starts where rounds are searched for one by one, times k^2
_MAX_COMPARED = 32  # subnetworks; above this the first start is good enough, and comparing starts takes long


def round_size(k: int, p: int) -> int:
    """e: sets of p of k subnetworks that together hold every subnetwork equally often."""
    return k // gcd(k, p)


@lru_cache(maxsize=16)
def find_rounds(k: int, p: int, breaks: tuple[int, ...] = ()) -> Ints:
    """Rounds [n, e, k] of k subnetworks, 1 <= p < k, with n e <= 4k sets.

    Args:
        k: number of subnetworks.
        p: holders of a unit.
        breaks: numbers of sets, ascending, after which a round may end early: its first sets of that number already
            hold all subnetworks equally often, or once more. Where sets of a round are disjoint, or their complements
            are, that is so for any of its sets, and `breaks` is ignored.
    """
    if 2 * p > k:
        complement = 1 - find_rounds(k, k - p, breaks)
        complement.setflags(write=False)
        return complement
    if p == 1:
        alone = np.eye(k, dtype=np.int64)[None]
        alone.setflags(write=False)
        return alone
    starts = _turned(k, p) if round_size(k, p) <= _MAX_TURNED else _one_by_one(k, p, breaks)
    best, least = next(starts), None
    for rounds in starts if not _is_flat(best) else ():
        least = _unevenness(best) if least is None else least
        unevenness = _unevenness(rounds)
        if unevenness < least:
            best, least = rounds, unevenness
        if _is_flat(best):
            break
    best.setflags(write=False)
    return best


def _is_flat(rounds: Ints) -> bool:
    """Whether all pairs of subnetworks share equally often."""
    shared = _overlaps(rounds)
    pairs = shared[~np.eye(len(shared), dtype=np.bool_)]
    return bool((pairs == pairs[0]).all())


def _overlaps(rounds: Ints) -> Exact:
    sets = rounds.reshape(-1, rounds.shape[-1]).astype(np.float64)
    return sets.T @ sets


def _unevenness(rounds: Ints) -> Fraction:
    """Sum of the 16th powers of the eigenvalues of the overlaps for one set: the larger ones decide."""
    power = _overlaps(rounds).astype(np.int64).astype(object)
    for _ in range(3):
        power = power @ power
    return Fraction(int((power * power).sum()), (rounds.shape[0] * rounds.shape[1]) ** 16)


def _deal_one(k: int, p: int, order: random.Random) -> Ints:
    """A round [e, k]: each set takes the p subnetworks that were taken least, ties are drawn."""
    round_ = np.zeros((round_size(k, p), k), dtype=np.int64)
    for row in round_:
        ties = np.array(order.sample(range(k), k))
        row[np.lexsort((ties, round_.sum(axis=0)))[:p]] = 1
    return round_


def _turned(k: int, p: int) -> Iterator[Ints]:
    """All turns of as many rounds as 4k sets allow, or of one less; each start is another."""
    e = k // p
    most = SETS_PER_SUBNETWORK * k // (e * (k - 1))
    for restart in range(_MAX_RESTARTS if k <= _MAX_COMPARED else 1):
        order = random.Random(restart)
        base = np.array([_deal_one(k, p, order) for _ in range(max(1, most - restart % 2))])
        _even_distances(base, order)
        turned = [np.concatenate([np.roll(base[..., :-1], turn, -1), base[..., -1:]], -1) for turn in range(k - 1)]
        yield np.concatenate(turned)


def _even_distances(base: Ints, order: random.Random) -> None:
    """Trade subnetworks between the sets of a round, in place, until pairs at each distance share equally often or
    no trade makes these numbers more even."""
    shares = np.array([[_at_distances(row[:-1]) for row in round_] for round_ in base])
    total = shares.sum(axis=(0, 1))
    for power in (2, 4):
        _lower(base, shares, total, power, order)


def _measure(total: Ints, power: int) -> int:
    """What is to be lowered: sum of the squares, or of the fourth powers of the eigenvalues."""
    less = total - total[1:].sum() // (len(total) - 1)
    less[0] = 0 if power == 2 else round(sqrt(len(total)))
    less = less if power == 2 else np.correlate(np.concatenate([less, less[:-1]]), less)
    return int((less * less).sum())


def _lower(base: Ints, shares: Ints, total: Ints, power: int, order: random.Random) -> None:
    num_rounds, e, k = base.shape
    fails, value = 0, _measure(total, power)
    for _ in range(_MAX_TRADES // k // power):
        if fails >= 3 * k * k // 2 or (total[1:] == total[1]).all():
            return
        number, (u, v) = order.randrange(num_rounds), order.sample(range(e), 2)
        a, b = (int(order.choice(np.flatnonzero(base[number, row]))) for row in (u, v))
        traded = base[number, [u, v]]
        traded[:, [a, b]] = traded[:, [b, a]]
        new = np.array([_at_distances(row[:-1]) for row in traded])
        change = new.sum(axis=0) - shares[number, [u, v]].sum(axis=0)
        changed = _measure(total + change, power)
        fails = 0 if changed < value else fails + 1
        if changed <= value:
            value = changed
            base[number, [u, v]], shares[number, [u, v]] = traded, new
            total += change


def _at_distances(row: Ints) -> Ints:
    """Ordered pairs of a set at each distance, [number of subnetworks that turn]."""
    return np.correlate(np.concatenate([row, row[:-1]]), row)


def _one_by_one(k: int, p: int, breaks: tuple[int, ...]) -> Iterator[Ints]:
    """Rounds that are searched for together: as many as 4k sets allow, or fewer, where pairs may come out more even."""
    most, e = SETS_PER_SUBNETWORK * gcd(k, p), round_size(k, p)
    counts = range(most, max(1, most // 2 - 1), -1)
    edges = [0, *breaks, e] if p // gcd(k, p) > 1 else [0, e]
    pairs = [pair for start, stop in pairwise(edges) for pair in combinations(range(start, stop), 2)]
    for restart in range(_MAX_WORK // k**2 if k <= _MAX_COMPARED // 2 else 1):
        order = random.Random(restart)
        rounds = np.array([_deal_one(k, p, order) for _ in range(counts[restart % len(counts)])])
        for power in (1, 3) if k <= 2 * _MAX_COMPARED else (1,):
            _even_pairs(rounds, pairs, power, order)
        yield rounds


def _even_pairs(rounds: Ints, pairs: list[tuple[int, int]], power: int, order: random.Random) -> None:
    """Trade subnetworks between two sets of a round, in place, while that lowers the sum of the squared overlaps
    (`power` 1), or of the fourth powers of their eigenvalues, less what all have in common (`power` 3)."""
    num_rounds, _, k = rounds.shape
    state = _Overlaps(_overlaps(rounds), power)
    places = [(number, u, v) for number in range(num_rounds) for u, v in pairs]
    fails, trials = 0, 2 * _MAX_TRADES // k
    while fails < len(places) and trials > 0:
        for number, u, v in order.sample(places, len(places)):
            trials -= 1
            trade = state.trade(rounds[number, u], rounds[number, v])
            fails = fails + 1 if trade is None else 0
            if trade is not None:
                rounds[number, [[u], [v]], trade] = rounds[number, [[v], [u]], trade]
            if fails >= len(places) or trials <= 0:
                return


class _Overlaps:
    """How often pairs of subnetworks share, [k, k], less the mean, and what is to be lowered of it."""

    def __init__(self, overlaps: Exact, power: int) -> None:
        k = len(overlaps)
        pairs = overlaps.sum() - overlaps.trace()
        self._power = power
        self._matrix = overlaps - pairs // (k * (k - 1))
        # With this on the diagonal about all eigenvalues are positive, so that even powers are lowered at the top.
        np.fill_diagonal(self._matrix, round(sqrt(k)) if power > 1 else 0)
        self._value, self._gradient = self._measure(self._matrix), self._slope(self._matrix)

    def _measure(self, matrix: Exact) -> float:
        squared = matrix if self._power == 1 else matrix @ matrix
        return float((squared * squared).sum())

    def _slope(self, matrix: Exact) -> Exact:
        return matrix.copy() if self._power == 1 else matrix @ matrix @ matrix

    def trade(self, first: Ints, second: Ints) -> list[int] | None:
        """Subnetworks (a, b) of two sets that should trade places, of those that the slope favors; None if none."""
        d = (second - first).astype(np.float64)
        a, b = np.flatnonzero(d < 0), np.flatnonzero(d > 0)
        if not a.size:
            return None
        slope, diagonal = self._gradient @ d, self._gradient.diagonal()
        gains = (slope + diagonal)[a][:, None] - (slope - diagonal)[b][None, :] - 2 * self._gradient[np.ix_(a, b)]
        index = int(gains.argmin())
        pair = [int(a[index // b.size]), int(b[index % b.size])]
        return pair if self._apply(d, pair) else None

    def _apply(self, d: Exact, pair: list[int]) -> bool:
        change = d.copy()
        change[pair] = 0  # the two share neither set, before and after
        matrix = self._matrix.copy()
        matrix[pair] += np.stack([change, -change])
        matrix[:, pair] += np.stack([change, -change], axis=1)
        value = self._measure(matrix)
        if value >= self._value:
            return False
        self._matrix, self._value, self._gradient = matrix, value, self._slope(matrix)
        return True
