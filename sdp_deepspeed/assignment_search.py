"""The bounded search behind the "balanced" assignment: the same result on every platform.

From a greedy table on, units change hands between two subnetworks at a time: first to balance FLOPs, then
bytes, then to make the pairs of subnetworks share as evenly as they can (smallest sum of squared overlaps:
for equal row sums that is the sum of the squared eigenvalues of the gossip matrix). Each goal keeps what the
goals before it reached. Last, a repair connects the graph, which is always possible when U (p-1) >= k-1.

Words: a table is a 0/1 matrix [U, k] of units by subnetworks; a trial looks at one pair of subnetworks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.assignment_graph import connect, num_components
from sdp_deepspeed.units import UnitCost

Ints = NDArray[np.int64]

_TOLERANCE = (105, 100)  # FLOPs, then bytes, may reach 1.05 of the mean
_WEIGHT_BITS = 10  # weights are scaled to this, so that no sum of squares below leaves 64 bits
_MAX_TRIALS = 20_000  # bounds the time: 1024 subnetworks have half a million pairs,
_MAX_WORK = 2**22  # and a trial takes longer the more units there are (trials times units)
_MAX_RESTARTS = 64
_PATIENCE = 24  # restarts without a better table before the search ends
_MAX_TIE_BREAK = 64  # subnetworks; above this, equal sums of squares count as equally good
_MAX_CANDIDATES = 128  # units of each side that one trial looks at


@dataclass(frozen=True)
class Problem:
    """What the search balances and spreads.

    Args:
        amounts: FLOPs and bytes of each unit, [U, 2].
        weights: scaled trainable elements of each unit, [U].
        num_subnetworks: k.
        num_holders: p.
    """

    amounts: Ints
    weights: Ints
    num_subnetworks: int
    num_holders: int

    @classmethod
    def of(cls, costs: Sequence[UnitCost], k: int, p: int) -> Problem:
        """The problem for units of `costs`."""
        amounts = np.array([[cost.flops, cost.num_bytes] for cost in costs], dtype=np.int64)
        return cls(amounts, _scaled([cost.num_parameters for cost in costs]), k, p)

    @property
    def max_trials(self) -> int:
        """Trials after which the search ends."""
        return min(_MAX_TRIALS, _MAX_WORK // len(self.weights))

    def loads(self, table: Ints) -> Ints:
        """FLOPs and bytes of each subnetwork, [k, 2]."""
        return table.T @ self.amounts

    def limits(self) -> Ints:
        """Largest loads that count as balanced, [2]."""
        most, of = _TOLERANCE
        totals = self.amounts.sum(axis=0) * self.num_holders
        return np.array([int(total) * most // (of * self.num_subnetworks) for total in totals], dtype=np.int64)

    def is_perfect(self, sum_of_squares: int) -> bool:
        """Whether every pair of subnetworks shares equally much, which reaches the bound of the spectral gap."""
        k, p = self.num_subnetworks, self.num_holders
        shared, pairs = int(self.weights.sum()) * p * (p - 1) // 2, k * (k - 1) // 2
        return sum_of_squares * pairs == shared**2


def search(costs: Sequence[UnitCost], k: int, p: int) -> Ints:
    """A table [U, k] for units of `costs`, p ones in each row; needs 1 <= p < k and U p >= k."""
    problem = Problem.of(costs, k, p)
    best: tuple[tuple[int, ...], Ints] | None = None
    num_trials = since_best = 0
    for restart in range(_MAX_RESTARTS):
        order = random.Random(restart)
        unbalanced = best is not None and best[0][1:3] != (0, 0)
        table = greedy(problem, order, largest_first=not unbalanced)
        num_trials += _balance(problem, table, order) + _spread(problem, table, order)
        connect(table, problem.amounts)
        score = _score(problem, table)
        since_best += 1
        if best is None or score < best[0]:
            best, since_best = (score, table), 0
        perfect = best[0][1:3] == (0, 0) and problem.is_perfect(best[0][3])
        if perfect or num_trials >= problem.max_trials or since_best >= _PATIENCE:
            break
    assert best is not None
    return best[1]


def greedy(problem: Problem, order: random.Random, *, largest_first: bool = True) -> Ints:
    """Each unit to the p least loaded subnetworks; equal loads are drawn from `order`.

    Largest unit first is the best single start; where it ends out of balance, units in random order give others.
    A subnetwork without units is always among the least loaded, so that none stays empty when U p >= k.
    """
    k, p = problem.num_subnetworks, problem.num_holders
    table = np.zeros((len(problem.amounts), k), dtype=np.int64)
    loads = np.zeros((k, 3), dtype=np.int64)  # FLOPs, bytes, units
    if largest_first:
        units = np.lexsort((-problem.amounts[:, 1], -problem.amounts[:, 0])).tolist()
    else:
        units = order.sample(range(len(table)), len(table))
    for unit in units:
        ties = np.array(order.sample(range(k), k))
        chosen = np.lexsort((ties, loads[:, 2], loads[:, 1], loads[:, 0]))[:p]
        table[unit, chosen] = 1
        loads[chosen, :2] += problem.amounts[unit]
        loads[chosen, 2] += 1
    return table


def _score(problem: Problem, table: Ints) -> tuple[int, ...]:
    """What restarts are compared by, smaller is better: pieces, excess FLOPs, excess bytes, overlaps."""
    excess = np.maximum(problem.loads(table).max(axis=0) - problem.limits(), 0)
    return (num_components(table), int(excess[0]), int(excess[1]), *_unevenness(problem, table))


def _unevenness(problem: Problem, table: Ints) -> tuple[int, int]:
    """Sum of the squared overlaps of pairs, and the sum of the fourth powers of the overlaps' eigenvalues.

    Tables with equal squares differ in their largest eigenvalue; the fourth powers (squared entries of the
    squared matrix, in integers) tell them apart.
    """
    overlaps = (table.T * problem.weights) @ table
    fourth = 0
    if problem.num_subnetworks <= _MAX_TIE_BREAK:
        exact = overlaps.astype(object)
        fourth = int(((exact @ exact) ** 2).sum())
    np.fill_diagonal(overlaps, 0)
    return sum(int(row) for row in (overlaps * overlaps).sum(axis=1)) // 2, fourth


def _scaled(weights: Sequence[int]) -> Ints:
    divisor = math.gcd(*weights) or 1
    weights = [weight // divisor for weight in weights]
    most = max(weights)
    if most <= 0:  # nothing is trained: spread all units alike
        return np.ones(len(weights), dtype=np.int64)
    if most.bit_length() > _WEIGHT_BITS:
        weights = [-(-(weight << _WEIGHT_BITS) // most) for weight in weights]
    return np.array(weights, dtype=np.int64)


def _pairs(problem: Problem, order: random.Random) -> Iterator[tuple[int, int]]:
    """One sweep over the pairs of subnetworks, or over as many random ones as there may be trials."""
    k, most = problem.num_subnetworks, problem.max_trials
    if k * (k - 1) // 2 > most:
        for _ in range(most):
            a = order.randrange(k)
            yield a, (a + order.randrange(1, k)) % k
    else:
        pairs = [(a, b) for a in range(k) for b in range(a)]
        order.shuffle(pairs)
        yield from pairs


def _balance(problem: Problem, table: Ints, order: random.Random) -> int:
    """Even out FLOPs until they are balanced or no change helps, then bytes; returns the number of trials."""
    num_trials = 0
    limits = problem.limits()
    for goal in (0, 1):
        improved = True
        while improved and num_trials < problem.max_trials and problem.loads(table).max(axis=0)[goal] > limits[goal]:
            improved = False
            for a, b in _pairs(problem, order):
                num_trials += 1
                improved |= _even_out(problem, table, goal, (a, b))
        limits[goal] = max(limits[goal], problem.loads(table).max(axis=0)[goal])
    return num_trials


def _even_out(problem: Problem, table: Ints, goal: int, pair: tuple[int, int]) -> bool:
    """Give one unit away, or swap two, so that the loads of a pair come closer; False if nothing helps.

    The heavier subnetwork gives, and never all that it has: that would not bring the loads closer.
    """
    loads = problem.loads(table[:, list(pair)])
    a, b = pair if loads[0, goal] >= loads[1, goal] else pair[::-1]
    gives, takes = _only(table, a, b), _only(table, b, a)
    # The last row of `back` stands for taking nothing back.
    back = np.vstack([problem.amounts[takes], np.zeros((1, 2), dtype=np.int64)])
    moved = problem.amounts[gives][:, None, :] - back[None, :, :]
    apart = abs(loads[0] - loads[1])
    result = abs(apart[goal] - 2 * moved[:, :, goal])
    if goal == 1:  # bytes must not undo what FLOPs reached
        worse = abs((loads[0, 0] - loads[1, 0]) * (1 if a == pair[0] else -1) - 2 * moved[:, :, 0])
        result[worse > apart[0]] = apart[goal]
    if result.size == 0 or result.min() >= apart[goal]:
        return False
    give, take = np.unravel_index(int(result.argmin()), result.shape)
    table[gives[give], [a, b]] = 0, 1
    if take < len(takes):
        table[takes[take], [a, b]] = 1, 0
    return True


def _only(table: Ints, a: int, b: int) -> Ints:
    """Units that `a` holds and `b` lacks."""
    return np.flatnonzero((table[:, a] == 1) & (table[:, b] == 0))[:_MAX_CANDIDATES]


def _spread(problem: Problem, table: Ints, order: random.Random) -> int:
    """Swap units between pairs while that lowers the sum of squared overlaps; returns the number of trials."""
    num_trials = 0
    overlaps = (table.T * problem.weights) @ table
    loads = problem.loads(table)
    limits = np.maximum(problem.limits(), loads.max(axis=0))
    improved = problem.num_holders > 1  # without sharing there is nothing to spread
    while improved and num_trials < problem.max_trials:
        improved = False
        for a, b in _pairs(problem, order):
            num_trials += 1
            swap = _best_swap(problem, table, overlaps, loads, limits, (a, b))
            if swap is not None:
                _apply_swap(problem, table, overlaps, loads, (a, b), swap)
                improved = True
    return num_trials


def _best_swap(
    problem: Problem, table: Ints, overlaps: Ints, loads: Ints, limits: Ints, pair: tuple[int, int]
) -> tuple[int, int] | None:
    """Units (u, v) whose swap, u from a to b and v from b to a, lowers the objective most; None if none does.

    With d_i = w_v m_vi - w_u m_ui and g_i = O_ai - O_bi for the other subnetworks i, the objective changes by
    2 sum_i d_i (g_i + d_i); all terms are integers.
    """
    a, b = pair
    gives, takes = _only(table, a, b), _only(table, b, a)
    if not len(gives) or not len(takes):
        return None
    g = overlaps[a] - overlaps[b]
    g[[a, b]] = 0
    w_u, w_v = problem.weights[gives], problem.weights[takes]
    # float32 counts exactly up to 2^24 subnetworks, and is many times faster than integers in a product
    common = (table[gives].astype(np.float32) @ table[takes].astype(np.float32).T).astype(np.int64)
    others = problem.num_holders - 1
    change_u = others * w_u**2 - w_u * (table[gives] @ g)
    change_v = others * w_v**2 + w_v * (table[takes] @ g)
    change = change_u[:, None] + change_v[None, :] - 2 * np.outer(w_u, w_v) * common
    moved = problem.amounts[gives][:, None, :] - problem.amounts[takes][None, :, :]
    allowed = ((loads[a] - moved <= limits) & (loads[b] + moved <= limits)).all(axis=2)
    change[~allowed] = 0
    if change.min() >= 0:
        return None
    u, v = np.unravel_index(int(change.argmin()), change.shape)
    return int(gives[u]), int(takes[v])


def _apply_swap(
    problem: Problem, table: Ints, overlaps: Ints, loads: Ints, pair: tuple[int, int], swap: tuple[int, int]
) -> None:
    (a, b), (u, v) = pair, swap
    d = problem.weights[v] * table[v] - problem.weights[u] * table[u]
    d[[a, b]] = 0  # the two never share u or v, neither before nor after
    overlaps[a] += d
    overlaps[b] -= d
    overlaps[:, a] = overlaps[a]
    overlaps[:, b] = overlaps[b]
    moved = problem.amounts[u] - problem.amounts[v]
    loads[a] -= moved
    loads[b] += moved
    table[[u, u, v, v], [a, b, a, b]] = 0, 1, 1, 0
