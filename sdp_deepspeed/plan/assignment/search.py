"""The bounded search behind the "balanced" assignment: the same result on every platform.

From a greedy table on, units change hands between two subnetworks at a time: first to balance FLOPs, then
bytes, then to make the pairs of subnetworks share as evenly as they can (smallest sum of squared overlaps:
for equal row sums that is the sum of the squared eigenvalues of the gossip matrix). Each goal keeps what the
goals before it reached. Last, a repair connects the graph, which is always possible when U (p-1) >= k-1.

With branches (units of heads or neurons) the start deals each branch out evenly, and what follows keeps that:
units of a branch trade places, or go where less of it is held. Only FLOPs may ask for more, down to one unit.

Words: a table is a 0/1 matrix [U, k] of units by subnetworks; a trial looks at one pair of subnetworks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np

from sdp_deepspeed.plan.assignment.graph import connect, num_components
from sdp_deepspeed.plan.assignment.problem import Branches, Ints, Problem
from sdp_deepspeed.units import UnitCost

_MAX_RESTARTS = 64
_PATIENCE = 24  # restarts without a better table before the search ends
_MAX_TIE_BREAK = 64  # subnetworks; above this, equal sums of squares count as equally good
_MAX_CANDIDATES = 128  # units of each side that one trial looks at


def search(costs: Sequence[UnitCost], k: int, p: Sequence[int], branches: Branches | None = None) -> Ints:
    """A table [U, k] for units of `costs`, with as many ones in each row as `p` says, below k; of each branch these
    must be k or more in all."""
    problem = Problem.of(costs, k, p, branches)
    best: tuple[tuple[int, ...], Ints] | None = None
    num_trials = since_best = 0
    for restart in range(_MAX_RESTARTS):
        order = random.Random(restart)
        unbalanced = best is not None and best[0][1:4] != (0, 0, 0)
        table = greedy(problem, order, largest_first=not unbalanced)
        num_trials += _balance(problem, table, order) + _spread(problem, table, order)
        connect(table, problem.amounts, problem.codes)
        score = _score(problem, table)
        since_best += 1
        if best is None or score < best[0]:
            best, since_best = (score, table), 0
        perfect = best[0][1:4] == (0, 0, 0) and problem.is_perfect(best[0][4])
        if perfect or num_trials >= problem.max_trials or since_best >= _PATIENCE:
            break
    assert best is not None
    return best[1]


def greedy(problem: Problem, order: random.Random, *, largest_first: bool = True) -> Ints:
    """Each unit to its p least loaded subnetworks; equal loads are drawn from `order`.

    Largest unit first is the best single start; where it ends out of balance, units in random order give others.
    A subnetwork without units is always among the least loaded, so that none stays empty when all p
    together are k or more. The units of a branch go to those that hold the fewest of that branch, which keeps these
    counts within one of each other.
    """
    k = problem.num_subnetworks
    table = np.zeros((len(problem.amounts), k), dtype=np.int64)
    loads = np.zeros((k, 3), dtype=np.int64)  # FLOPs, bytes, units
    held = np.zeros((problem.num_branches + 1, k), dtype=np.int64)
    if largest_first:
        units = np.lexsort((-problem.amounts[:, 1], -problem.amounts[:, 0])).tolist()
    else:
        units = order.sample(range(len(table)), len(table))
    for unit in units:
        ties, code = np.array(order.sample(range(k), k)), problem.codes[unit]
        chosen = np.lexsort((ties, loads[:, 2], loads[:, 1], loads[:, 0], held[code]))
        chosen = chosen[: problem.num_holders[unit]]
        held[code, chosen] += int(code > 0)  # block units are only balanced
        table[unit, chosen] = 1
        loads[chosen, :2] += problem.amounts[unit]
        loads[chosen, 2] += 1
    return table


def _score(problem: Problem, table: Ints) -> tuple[int, ...]:
    """What restarts are compared by, smaller is better: pieces, excess FLOPs, widths, excess bytes, overlaps."""
    excess = np.maximum(problem.loads(table).max(axis=0) - problem.limits(), 0)
    pieces, ragged = num_components(table), problem.raggedness(table)
    return (pieces, int(excess[0]), ragged, int(excess[1]), *_unevenness(problem, table))


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
    """Even out FLOPs until they are balanced or no change helps, then bytes; returns the number of trials.

    Where FLOPs need it, widths within branches may become ragged.
    """
    num_trials = 0
    limits = problem.limits()
    for goal, ragged in [(0, False), (0, True), (1, False)] if problem.num_branches else [(0, False), (1, False)]:
        improved = True
        while improved and num_trials < problem.max_trials and problem.loads(table).max(axis=0)[goal] > limits[goal]:
            improved = False
            for a, b in _pairs(problem, order):
                num_trials += 1
                improved |= _even_out(problem, table, goal, (a, b), ragged=ragged)
    return num_trials


def _even_out(problem: Problem, table: Ints, goal: int, pair: tuple[int, int], *, ragged: bool) -> bool:
    """Give one unit away, or swap two, so that the loads of a pair come closer; False if nothing helps.

    The heavier subnetwork gives, and never all that it has: that would not bring the loads closer.
    """
    loads = problem.loads(table[:, list(pair)])
    if ragged and (loads[:, goal] <= problem.limits()[goal]).all():
        return False
    a, b = pair if loads[0, goal] >= loads[1, goal] else pair[::-1]
    gives, takes = _spaced(_only(problem, table, a, b)), _spaced(_only(problem, table, b, a))
    # The last row of `back` stands for taking nothing back.
    back = np.vstack([problem.amounts[takes], np.zeros((1, 2), dtype=np.int64)])
    moved = problem.amounts[gives][:, None, :] - back[None, :, :]
    apart = abs(loads[0] - loads[1])
    result = abs(apart[goal] - 2 * moved[:, :, goal])
    if goal == 1:  # bytes must not undo what FLOPs reached
        worse = abs((loads[0, 0] - loads[1, 0]) * (1 if a == pair[0] else -1) - 2 * moved[:, :, 0])
        result[worse > apart[0]] = apart[goal]
    if problem.num_branches:
        result[~problem.may_trade(table, gives, takes, (a, b), ragged=ragged)] = apart[goal]
    if result.size == 0 or result.min() >= apart[goal]:
        return False
    give, take = np.unravel_index(int(result.argmin()), result.shape)
    table[gives[give], [a, b]] = 0, 1
    if take < len(takes):
        table[takes[take], [a, b]] = 1, 0
    return True


def _only(problem: Problem, table: Ints, a: int, b: int) -> Ints:
    """Units that `a` holds and `b` lacks; all of them if there are branches, because few pairs may trade then."""
    units = np.flatnonzero((table[:, a] == 1) & (table[:, b] == 0))
    return units if problem.num_branches else units[:_MAX_CANDIDATES]


def _spaced(units: Ints) -> Ints:
    """As many of the units as one trial looks at, from all branches."""
    return units[:: -(-len(units) // _MAX_CANDIDATES) or 1]


def _spread(problem: Problem, table: Ints, order: random.Random) -> int:
    """Swap units between pairs while that lowers the sum of squared overlaps; returns the number of trials."""
    num_trials = 0
    overlaps = (table.T * problem.weights) @ table
    loads = problem.loads(table)
    limits = np.maximum(problem.limits(), loads.max(axis=0))
    improved = bool(problem.num_holders.max() > 1)  # without sharing there is nothing to spread
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
    gives, takes = _only(problem, table, a, b), _only(problem, table, b, a)
    i, j = _alike(problem, gives, takes)
    if not i.size or not j.size:
        return None
    g = overlaps[a] - overlaps[b]
    g[[a, b]] = 0
    w_u, w_v = problem.weights[gives], problem.weights[takes]
    # float32 counts exactly up to 2^24 subnetworks, and is many times faster than integers in a product
    common = (table[gives].astype(np.float32) @ table[takes].astype(np.float32).T)[i, j].astype(np.int64)
    others = problem.num_holders - 1
    change_u = others[gives] * w_u**2 - w_u * (table[gives] @ g)
    change_v = others[takes] * w_v**2 + w_v * (table[takes] @ g)
    change = change_u[i] + change_v[j] - 2 * w_u[i] * w_v[j] * common
    moved = problem.amounts[gives][i] - problem.amounts[takes][j]
    allowed = ((loads[a] - moved <= limits) & (loads[b] + moved <= limits)).all(axis=-1)
    change[~allowed] = 0
    if change.min() >= 0:
        return None
    best = int(change.argmin())
    i, j = np.broadcast_arrays(i, j)
    return int(gives[i.flat[best]]), int(takes[j.flat[best]])


def _alike(problem: Problem, gives: Ints, takes: Ints) -> tuple[Ints, Ints]:
    """Indices of `gives` and `takes` that may trade places without changing the widths within branches.

    Either pairs, two arrays of one length, or without branches all combinations: a column and a row.
    """
    if not problem.num_branches:
        return np.arange(len(gives))[:, None], np.arange(len(takes))[None, :]
    i, j = np.nonzero(problem.codes[gives][:, None] == problem.codes[takes][None, :])
    step = -(-len(i) // _MAX_CANDIDATES**2) or 1
    return i[::step], j[::step]


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
