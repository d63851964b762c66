"""Dealing many units from few holder sets (`rounds`): the goals of the search over all units, in a few passes.

Units are cut into hands. A hand gets the sets of one round, or the first ones if it is smaller: then every subnetwork
holds as equally many units of a branch as possible. A hand may change its round, and a block unit its set, as long as
that brings FLOPs and then bytes closer to balance, or keeps them there and lets pairs of subnetworks share more evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np

from sdp_deepspeed.plan.assignment.graph import connect, is_connected
from sdp_deepspeed.plan.assignment.problem import Ints, Problem
from sdp_deepspeed.plan.assignment.rounds import find_rounds

_MAX_PASSES = 8
_MAX_WORK = 2**12  # hands that are looked at


def deal(problem: Problem, beside: tuple[Ints, Ints] | None = None) -> Ints:
    """A table [U, k] with at most 4k different rows; needs 1 < p < k - 1, k / p units, of each branch too.

    Args:
        problem: costs of the units.
        beside: sets [V, k] and weights [V] of other units: with them together pairs of subnetworks share evenly.
    """
    k, p = problem.num_subnetworks, problem.num_holders
    e = k // gcd(k, p)
    classes = equal_units(problem)
    left = {len(units) % e for units in classes if problem.codes[units[0]] > 0} - {0, 1, e - 1}
    table = _Table(problem, find_rounds(k, p, tuple(sorted(left | {e - size for size in left}))))
    if beside is not None:
        table.count(*beside)
    hands = _hands(problem, classes, e)
    for hand in hands:
        table.place(hand, table.first_choice(hand))
    table.improve_all(hands)
    single = [_Hand(np.array([unit]), is_neutral=False) for unit in range(len(problem.amounts))]
    for in_branch in (False, True):  # widths give way to FLOPs, but not to bytes
        if table.excess()[0] > 0:
            table.improve_all([hand for hand in single if (problem.codes[hand.units[0]] > 0) == in_branch], alone=True)
    rows = table.rows()
    if not is_connected(rows):
        connect(rows, problem.amounts, problem.codes)
    return rows


@dataclass(frozen=True, eq=False)
class _Hand:
    """Units that get sets of one round.

    Args:
        units: their indices, the heaviest first; one block unit, or at most e.
        is_neutral: whether it loads all subnetworks alike, whatever the round.
    """

    units: Ints
    is_neutral: bool


def equal_units(problem: Problem) -> list[Ints]:
    """Units of one branch, or blocks of equal cost; the heaviest first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for unit in np.lexsort((-problem.amounts[:, 1], -problem.amounts[:, 0])).tolist():
        code = int(problem.codes[unit])
        cost = () if code else (*problem.amounts[unit].tolist(), int(problem.weights[unit]))
        found.setdefault((code, *cost), []).append(unit)
    return [np.array(units, dtype=np.int64) for units in found.values()]


def _hands(problem: Problem, classes: list[Ints], e: int) -> list[_Hand]:
    """Whole rounds of equal units first: they are neutral. Then the others, those of most FLOPs first."""
    hands = []
    for units in classes:
        is_block = bool(problem.codes[units[0]] == 0)
        stop = len(units) - len(units) % e
        cuts = [*range(e, stop + 1, e), *(range(stop + 1, len(units)) if is_block else ())]
        for part in np.split(units, cuts):
            if part.size:
                alike = bool((problem.amounts[part] == problem.amounts[part[0]]).all())
                hands.append(_Hand(part, alike and len(part) == e))
    return sorted(hands, key=lambda hand: (not hand.is_neutral, -int(problem.amounts[hand.units, 0].sum())))


class _Table:
    """Which set each unit has, the loads of subnetworks, and the weight that each set carries."""

    def __init__(self, problem: Problem, rounds: Ints) -> None:
        n, e, k = rounds.shape
        self._amounts, self._codes = problem.amounts, problem.codes
        self._weights = np.maximum(problem.weights, 1)  # what is not trained connects subnetworks, too
        self._sets = rounds.reshape(n * e, k)
        self._rounds = np.arange(n * e).reshape(n, e)
        times = int(rounds[0].sum(axis=0)[0])
        self._any_order = times in (1, e - 1)  # any sets of a round hold all equally often, or once more
        exact = self._sets.astype(np.float32)  # a product of these counts exactly up to 2^24 subnetworks
        self._common = (exact @ exact.T).astype(np.int32) ** 2  # what two sets add to the sum of squared overlaps
        self._slope = np.zeros(n * e, dtype=np.int64)  # what a unit of weight 1 would add to it, by set
        self._loads = np.zeros((k, 2), dtype=np.int64)
        self._limits = problem.limits()
        self._chosen = np.full(len(problem.amounts), -1, dtype=np.int64)

    def count(self, sets: Ints, weights: Ints) -> None:
        """Count what units outside the problem share."""
        self._slope += ((self._sets @ sets.T) ** 2) @ weights

    def excess(self) -> Ints:
        """FLOPs and bytes that subnetworks have above the limits, [2]."""
        return np.maximum(self._loads - self._limits, 0).sum(axis=0)

    def improve_all(self, hands: list[_Hand], *, alone: bool = False) -> None:
        """Until no hand gets better sets, or enough was tried."""
        for _ in range(min(_MAX_PASSES, 1 + _MAX_WORK // (len(hands) + 1))):
            if not sum(self.improve(hand, alone=alone) for hand in hands):
                return

    def rows(self) -> Ints:
        """The table [U, k]."""
        return self._sets[self._chosen]

    def place(self, hand: _Hand, sets: Ints, sign: int = 1) -> None:
        """Give sets to the units of a hand, or take them back (`sign` -1)."""
        amounts, weights = self._amounts[hand.units], self._weights[hand.units]
        self._loads += sign * (self._sets[sets].T @ amounts)
        self._slope += sign * (self._common[:, sets] @ weights)
        self._chosen[hand.units] = sets

    def first_choice(self, hand: _Hand) -> Ints:
        """Of the sets that a hand may have those of the least loaded subnetworks, then those that share least."""
        options = self._options(hand)
        if hand.is_neutral:
            chosen = int(self._sharing(hand, options).argmin())
        else:
            flops, num_bytes = (self._sets @ self._loads)[options].sum(axis=1).T
            chosen = int(np.lexsort((self._sharing(hand, options), num_bytes, flops))[0])
        return options[chosen]

    def improve(self, hand: _Hand, *, alone: bool = False) -> bool:
        """Give a hand better sets if there are any; `alone` means a unit whose branch need not be dealt out evenly."""
        before = self._chosen[hand.units]
        self.place(hand, before, -1)
        options = np.vstack([before, self._options(hand)])
        if alone and self._codes[hand.units[0]] > 0:  # every subnetwork keeps a unit of the branch
            others = np.setdiff1d(np.flatnonzero(self._codes == self._codes[hand.units[0]]), hand.units)
            lacking = self._sets[self._chosen[others]].sum(axis=0) == 0
            options = options[self._sets[options[:, 0]][:, lacking].all(axis=1)]
        sharing = self._sharing(hand, options)
        if hand.is_neutral:
            chosen = int(sharing.argmin())
        else:
            added = np.einsum("orw,ra->owa", self._sets[options], self._amounts[hand.units])
            flops, num_bytes = np.maximum(self._loads + added - self._limits, 0).sum(axis=1).T
            chosen = int(np.lexsort((sharing, num_bytes, flops))[0])
        self.place(hand, options[chosen])
        return chosen > 0

    def _options(self, hand: _Hand) -> Ints:
        """Sets that a hand may have, [options, units]."""
        size = len(hand.units)
        if size == 1:
            return self._rounds.reshape(-1, 1)
        if hand.is_neutral:
            return self._rounds
        if not (self._any_order or size >= self._rounds.shape[1] - 1):
            return np.vstack([self._rounds[:, :size], self._rounds[:, -size:]])
        flops, num_bytes = (self._sets @ self._loads)[self._rounds].transpose(2, 0, 1)
        return np.take_along_axis(self._rounds, np.lexsort((num_bytes, flops)), axis=1)[:, :size]

    def _sharing(self, hand: _Hand, options: Ints) -> Ints:
        """What each option would add to the sum of squared overlaps, [options]."""
        weights = self._weights[hand.units]
        result = 2 * (self._slope[options] @ weights)
        for i, weight in enumerate(weights.tolist()):
            result += weight * (self._common[options[:, i, None], options] @ weights)
        return result
