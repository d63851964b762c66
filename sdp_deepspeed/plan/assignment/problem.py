"""What the search for a "balanced" table works on: costs as integers, limits, and which units may change hands.

Words: a table is a 0/1 matrix [U, k] of units by subnetworks. Units of heads or neurons belong to a branch of
which every subnetwork keeps a unit; block units belong to none and have code 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.units import UnitCost

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Branches = Sequence[str | None]

_TOLERANCE = (105, 100)  # FLOPs, then bytes, may reach 1.05 of the mean
_WEIGHT_BITS = 10  # weights are scaled to this, so that no sum of squares in the search leaves 64 bits
_MAX_TRIALS = 20_000  # bounds the time: 1024 subnetworks have half a million pairs,
_MAX_WORK = 2**22  # and a trial takes longer the more units there are (trials times units)


@dataclass(frozen=True)
class Problem:
    """What the search balances and spreads.

    Args:
        amounts: FLOPs and bytes of each unit, [U, 2].
        weights: trainable elements of each unit divided by its p, scaled, [U].
        codes: the branch of each unit, [U]: 1 to the number of branches, 0 for none.
        num_branches: number of branches, 0 if all units are blocks.
        num_subnetworks: k.
        num_holders: p of each unit, [U].
    """

    amounts: Ints
    weights: Ints
    codes: Ints
    num_branches: int
    num_subnetworks: int
    num_holders: Ints

    @classmethod
    def of(cls, costs: Sequence[UnitCost], k: int, p: Sequence[int], branches: Branches | None = None) -> Problem:
        """The problem for units of `costs` with p holders each, and their branches if there are any."""
        amounts = np.array([[cost.flops, cost.num_bytes] for cost in costs], dtype=np.int64)
        common = math.lcm(*p)
        weights = _scaled([cost.num_parameters * common // n for cost, n in zip(costs, p, strict=True)])
        codes = branch_codes(branches, len(costs))
        return cls(amounts, weights, codes, int(codes.max()), k, np.array(p, dtype=np.int64))

    def part(self, units: Ints) -> Problem:
        """The problem for some of the units."""
        return replace(
            self,
            amounts=self.amounts[units],
            weights=self.weights[units],
            codes=self.codes[units],
            num_holders=self.num_holders[units],
        )

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
        totals = self.num_holders @ self.amounts
        return np.array([int(total) * most // (of * self.num_subnetworks) for total in totals], dtype=np.int64)

    def is_perfect(self, sum_of_squares: int) -> bool:
        """Whether every pair of subnetworks shares equally much, which reaches the bound of the spectral gap."""
        k, p = self.num_subnetworks, self.num_holders
        shared, pairs = int(self.weights @ (p * (p - 1))) // 2, k * (k - 1) // 2
        return sum_of_squares * pairs == shared**2

    def raggedness(self, table: Ints) -> int:
        """By how many units widths within branches miss the most even ones: the mean, rounded down or up."""
        in_branches = self.codes > 0
        counts = np.zeros((self.num_branches + 1, self.num_subnetworks), dtype=np.int64)
        np.add.at(counts, self.codes[in_branches], table[in_branches])
        fewest, left = np.divmod(counts.sum(axis=1, keepdims=True), self.num_subnetworks)
        return int(np.maximum(counts - fewest - (left > 0), 0).sum() + np.maximum(fewest - counts, 0).sum())

    def may_leave(self, table: Ints, units: Ints, pair: tuple[int, int], *, ragged: bool) -> Bools:
        """Which of `units` may go from the first of `pair` to the second with nothing of their branch in return.

        Either keeps widths within a branch as even as they are, and so a unit of each branch everywhere; or,
        `ragged`, keeps only the latter.
        """
        codes = self.codes[units]
        giver, taker = (np.bincount(self.codes[table[:, one] == 1], minlength=self.num_branches + 1) for one in pair)
        enough = giver > 1 if ragged else giver > taker
        allowed: Bools = (codes == 0) | enough[codes]
        return allowed

    def may_trade(self, table: Ints, gives: Ints, takes: Ints, pair: tuple[int, int], *, ragged: bool) -> Bools:
        """Which of `gives` may go from a to b for which of `takes`, or for nothing (last column), [gives, takes + 1].

        Units of one branch may always trade places: then each keeps as many of it as before.
        """
        alone = self.may_leave(table, gives, pair, ragged=ragged)[:, None]
        back = self.may_leave(table, takes, pair[::-1], ragged=ragged)[None, :]
        same = self.codes[gives][:, None] == self.codes[takes][None, :]
        return np.hstack([same | (alone & back), alone])


def branch_codes(branches: Branches | None, num_units: int) -> Ints:
    """A number for each unit's branch, [U]: from 1 on in order of appearance, 0 for none."""
    codes: dict[str | None, int] = {None: 0}
    return np.array([codes.setdefault(name, len(codes)) for name in branches or [None] * num_units], dtype=np.int64)


def _scaled(weights: Sequence[int]) -> Ints:
    divisor = math.gcd(*weights) or 1
    weights = [weight // divisor for weight in weights]
    most = max(weights)
    if most <= 0:  # nothing is trained: spread all units alike
        return np.ones(len(weights), dtype=np.int64)
    if most.bit_length() > _WEIGHT_BITS:
        weights = [-(-(weight << _WEIGHT_BITS) // most) for weight in weights]
    return np.array(weights, dtype=np.int64)
