"""Dealing many units from few holder sets (`rounds`): the goals of the search over all units, in a few passes.

Units are cut into hands. A hand gets the sets of one round, or the first ones if it is smaller: then every subnetwork
holds as equally many units of a branch as possible. A hand may change its round, and a block unit its set, as long as
that brings FLOPs and then bytes closer to balance, or keeps them there and lets pairs of subnetworks share more evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sdp_deepspeed.plan.assignment.graph import connect, is_connected
from sdp_deepspeed.plan.assignment.problem import Ints, Problem
from sdp_deepspeed.plan.assignment.rounds import SETS_PER_SUBNETWORK, find_rounds, round_size

_MAX_PASSES = 8
_MAX_WORK = 2**12  # hands that are looked at


def deal(problem: Problem, beside: tuple[Ints, Ints] | None = None) -> Ints:
    """A table [U, k] with at most 4k different rows, or one round for each p if that is more; needs 1 <= p < k, and
    k / p units of each branch that no whole unit serves.

    Args:
        problem: costs of the units.
        beside: sets [V, k] and weights [V] of other units: with them together pairs of subnetworks share evenly.
    """
    classes = equal_units(problem)
    table = _Table(problem, _rounds_by_holders(problem, classes))
    if beside is not None:
        table.count(*beside)
    hands = [hand for units in classes for hand in _hands(problem, units, table.size_of_round(units[0]))]
    hands.sort(key=lambda hand: (not hand.is_neutral, -int(problem.amounts[hand.units, 0].sum())))
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


def _rounds_by_holders(problem: Problem, classes: list[Ints]) -> dict[int, Ints]:
    """For each p its rounds [n, e, k]: where there are several, each has a share of the 4k sets."""
    k, found = problem.num_subnetworks, {}
    numbers = np.unique(problem.num_holders).tolist()
    for p in numbers:
        e = round_size(k, p)
        in_branches = [units for units in classes if problem.codes[units[0]] > 0 and problem.num_holders[units[0]] == p]
        left = {len(units) % e for units in in_branches} - {0, 1, e - 1}
        rounds = find_rounds(k, p, tuple(sorted(left | {e - size for size in left})))
        found[p] = rounds[: max(1, SETS_PER_SUBNETWORK * k // (e * len(numbers)))]
    return found


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
    """Units of one branch, or blocks of equal cost, with as many holders; the heaviest first."""
    found: dict[tuple[int, ...], list[int]] = {}
    for unit in np.lexsort((-problem.amounts[:, 1], -problem.amounts[:, 0])).tolist():
        code, num_holders = int(problem.codes[unit]), int(problem.num_holders[unit])
        cost = () if code else (*problem.amounts[unit].tolist(), int(problem.weights[unit]))
        found.setdefault((code, num_holders, *cost), []).append(unit)
    return [np.array(units, dtype=np.int64) for units in found.values()]


def _hands(problem: Problem, units: Ints, e: int) -> Iterator[_Hand]:
    """Of equal units: whole rounds, which are neutral if they weigh alike, and what is left."""
    is_block = bool(problem.codes[units[0]] == 0)
    stop = len(units) - len(units) % e
    cuts = [*range(e, stop + 1, e), *(range(stop + 1, len(units)) if is_block else ())]
    for part in np.split(units, cuts):
        if part.size:
            alike = bool((problem.amounts[part] == problem.amounts[part[0]]).all())
            yield _Hand(part, alike and len(part) == e)


class _Table:
    """Which set each unit has, the loads of subnetworks, and the weight that each set carries."""

    def __init__(self, problem: Problem, rounds: dict[int, Ints]) -> None:
        self._amounts, self._codes, self._num_holders = problem.amounts, problem.codes, problem.num_holders
        self._weights = np.maximum(problem.weights, 1)  # what is not trained connects subnetworks, too
        self._sets = np.concatenate([sets.reshape(-1, sets.shape[-1]) for sets in rounds.values()])
        n, k = self._sets.shape
        self._rounds: dict[int, Ints] = {}
        left = np.arange(n)
        for p, sets in rounds.items():
            size = sets.shape[0] * sets.shape[1]
            self._rounds[p], left = left[:size].reshape(sets.shape[:2]), left[size:]
        exact = self._sets.astype(np.float32)  # a product of these counts exactly up to 2^24 subnetworks
        self._common = (exact @ exact.T).astype(np.int32) ** 2  # what two sets add to the sum of squared overlaps
        self._slope = np.zeros(n, dtype=np.int64)  # what a unit of weight 1 would add to it, by set
        self._loads = np.zeros((k, 2), dtype=np.int64)
        self._limits = problem.limits()
        self._chosen = np.full(len(problem.amounts), -1, dtype=np.int64)

    def size_of_round(self, unit: int) -> int:
        """e for a unit's p."""
        return int(self._rounds[int(self._num_holders[unit])].shape[1])

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
            serves = np.atleast_1d(self._sets[options[:, 0]][:, lacking].all(axis=1))
            serves[0] = True  # where whole units serve the branch, these may not
            options = options[serves]
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
        size, rounds = len(hand.units), self._rounds[int(self._num_holders[hand.units[0]])]
        if size == 1:
            return rounds.reshape(-1, 1)
        if hand.is_neutral:
            return rounds
        e = rounds.shape[1]
        times = int(self._sets[rounds[0], 0].sum())
        any_order = times in (1, e - 1)  # any sets of a round hold all equally often, or once more
        if not (any_order or size >= e - 1):
            return np.vstack([rounds[:, :size], rounds[:, -size:]])
        flops, num_bytes = (self._sets @ self._loads)[rounds].transpose(2, 0, 1)
        return np.take_along_axis(rounds, np.lexsort((num_bytes, flops)), axis=1)[:, :size]

    def _sharing(self, hand: _Hand, options: Ints) -> Ints:
        """What each option would add to the sum of squared overlaps, [options]."""
        weights = self._weights[hand.units]
        result = 2 * (self._slope[options] @ weights)
        for i, weight in enumerate(weights.tolist()):
            result += weight * (self._common[options[:, i, None], options] @ weights)
        return result
