"""Assign subnetworks to ranks, and units to subnetworks: holder sets are cyclic translates of a base block.

A base block is a set B of p elements of Z_k; its k translates B + t are the holder sets. The number of sets that
contain two given subnetworks depends on their difference only, and equals the number of times this difference occurs
within B. The flatter these counts, the closer the spectral gap comes to its bound k (p-1) / (p (k-1)). k equal units
are balanced exactly. A rank is in p sets of each base block. Small p use several base blocks, as many as raise the gap
and keep a rank in at most eight holder sets; sets of several p add up.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb, gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.plan.connectivity import Ints, incidence, num_components, spectral_gap
from sdp_deepspeed.units import Subnetworks, UnitCost

BaseBlock = tuple[int, ...]

MAX_SETS_PER_RANK = 8  # of units with the same p, if p is not larger
_BALANCED = 1.05  # max/mean of FLOPs
_TRIES, _WORK = 48, 12_000  # maximum number of tries; maximum of tries * leftover units * k
_SWEEPS, _GOOD = 4, 1.01  # of the local search: sweeps, and balance at which it ends
_NEED = 1 << 54  # larger than any change of loads; 256 times it fits into int64
_EXHAUSTIVE = 150_000  # maximum of candidates * k for an exhaustive search, else a local one
_WANTED = "wanted"
_SWAPS, _PATIENCE = 256, 6  # of the local search: candidates per step, steps without success


def subnetwork_of_rank(k: int, data_parallel_size: int) -> tuple[int, ...]:
    """Subnetwork of each rank. Replicas are neighbors: launchers number ranks by node, so they share nodes."""
    return tuple(rank * k // data_parallel_size for rank in range(data_parallel_size))


class UnitClass(NamedTuple):
    """Units that are assigned together: blocks of equal cost, or the neurons or heads of a branch.

    Args:
        branch: None for blocks.
        cost: None for neurons and heads.
    """

    p: int
    branch: str | None
    cost: UnitCost | None


@lru_cache(maxsize=512)
def base_blocks(k: int, p: int, most: int = 1, even: tuple[int, ...] = ()) -> tuple[BaseBlock, ...]:
    """Base blocks of p elements of Z_k, the flattest first.

    Args:
        k, p: with 1 <= p < k.
        most: maximum number of blocks; fewer if that maximizes the spectral gap.
        even: divisors of k. Blocks have the same number of elements in each residue class of these, as far as possible;
            then translates by multiples of such a divisor cover Z_k evenly.
    """
    if 2 * p > k:  # the difference counts of the complement are equally flat
        complements = [set(range(k)).difference(block) for block in base_blocks(k, k - p, most, even)]
        return tuple(tuple(sorted(block)) for block in complements)
    blocks: list[BaseBlock] = []
    gaps: list[float] = []
    spectrum = np.zeros(k // 2 + 1)
    while len(blocks) < most:
        blocks.append(_flattest(k, p, spectrum, even))
        spectrum = spectrum + np.abs(np.fft.rfft(_indicator(blocks[-1:], k)[0])) ** 2
        gaps.append(round(1 - float(spectrum[1:].max()) / (len(blocks) * p * p), 6))
    return tuple(blocks[: gaps.index(max(gaps)) + 1])


def _flattest(k: int, p: int, spectrum: NDArray[np.float64], even: tuple[int, ...]) -> BaseBlock:
    """The best block to add to blocks whose power spectra sum to `spectrum`."""
    if comb(k - 1, p - 1) * k <= _EXHAUSTIVE:
        blocks = [(0, *rest) for rest in combinations(range(1, k), p - 1)]
        return blocks[int(np.lexsort(_scores(_indicator(blocks, k), spectrum, even))[0])]
    shuffler = random.Random(0)
    block, best, failures = tuple(shuffler.sample(range(k), p)), None, 0
    while failures < _PATIENCE:
        outside = sorted(set(range(k)) - set(block))
        swaps = [block]
        for _ in range(_SWAPS):
            place = shuffler.randrange(p)
            swaps.append((*block[:place], shuffler.choice(outside), *block[place + 1 :]))
        scores = _scores(_indicator(swaps, k), spectrum, even)
        first = int(np.lexsort(scores)[0])
        block = swaps[first]
        reached = tuple(float(score[first]) for score in reversed(scores))
        failures = failures + 1 if best == reached else 0
        best = reached
    return tuple(sorted((element - min(block)) % k for element in block))


def _scores(
    table: Ints, spectrum: NDArray[np.float64], even: tuple[int, ...]
) -> tuple[Ints | NDArray[np.float64], ...]:
    """Scores to minimize, last one first: uneven residues, squares of difference counts, 1 - gap; [n] each."""
    n, k = table.shape
    power = np.abs(np.fft.rfft(table, axis=1)) ** 2 + spectrum
    differences = np.rint(np.fft.irfft(power, k, axis=1)).astype(np.int64)[:, 1:]
    uneven = np.zeros(n, dtype=np.int64)
    for divisor in even:
        uneven += (table.reshape(n, k // divisor, divisor).sum(axis=1) ** 2).sum(axis=1)
    return np.round(power[:, 1:].max(axis=1), 6), (differences**2).sum(axis=1), uneven


def _indicator(blocks: Sequence[BaseBlock], k: int) -> Ints:
    table = np.zeros((len(blocks), k), dtype=np.int64)
    np.put_along_axis(table, np.array(blocks), 1, axis=1)
    return table


@lru_cache(maxsize=512)
def translates(block: BaseBlock, k: int) -> tuple[Subnetworks, ...]:
    """Translates B + t for t from 0 to k - 1, each ascending."""
    return tuple(tuple(sorted((element + t) % k for element in block)) for t in range(k))


@lru_cache(maxsize=512)
def _table(block: BaseBlock, k: int) -> Ints:
    return incidence(translates(block, k), k)


def assign(
    costs: Sequence[UnitCost],
    num_holders: Sequence[int],
    num_subnetworks: int,
    *,
    seed: int = 0,
    branches: Sequence[str | None] | None = None,
    wanted: Collection[int] = (),
    balance_elements: bool = False,
) -> tuple[Subnetworks, ...]:
    """Subnetworks of each unit, ascending; deterministic.

    The units of a class are assigned to all translates in turn. Leftover units, fewer than a round, start with evenly
    spread or random translates, and move while that improves the balance. Several variants are tried, since none is
    best for all models; the best attempt connects the subnetworks, balances within 5%, and has the largest spectral
    gap.

    Args:
        costs: costs of the units, in model order.
        num_holders: p of each unit, 1 to k.
        num_subnetworks: k.
        seed: permutes the translates of equal units; the holder sets stay the same.
        branches: branch of each unit of neurons or heads, of which every subnetwork needs one; None for blocks.
        wanted: blocks of which every subnetwork gets one if there are enough.
        balance_elements: whether to balance the elements that each subnetwork's optimizer owns, too.
    """
    k, names = num_subnetworks, [None] * len(costs) if branches is None else branches
    classes: dict[UnitClass, list[int]] = {}
    alike: dict[tuple[UnitClass, UnitCost, bool], list[int]] = {}
    for unit, (p, name, cost) in enumerate(zip(num_holders, names, costs, strict=True)):
        of_unit = UnitClass(p, name, cost if name is None else None)
        classes.setdefault(of_unit, []).append(unit)
        alike.setdefault((of_unit, cost, unit in wanted), []).append(unit)
    amounts = _amounts(costs, num_holders, balance_elements)
    weights = [cost.num_parameters for cost in costs]
    num_rest = sum(len(units) % k for of_units, units in classes.items() if of_units.p < k)
    best: tuple[tuple[float, ...], list[Subnetworks]] | None = None
    for number in range(min(_TRIES, 3 + _WORK // (max(1, num_rest, len(costs) // 8) * k))):
        attempt = _Attempt(classes, amounts, k, _Variant.of(number), wanted)
        attempt.balance()
        flaws = attempt.flaws()
        score = (*flaws, round(1 - spectral_gap(attempt.holders, weights, k), 6))
        if best is None or score < best[0]:
            best = score, attempt.holders
        if not num_rest and not flaws[0] and not any(flaws[2:-1]):
            break
    assert best is not None
    holders = best[1]
    if num_components(holders, k) > 1 and len({*num_holders}) == 1 and not wanted and not any(names):
        p = num_holders[0]  # few units: a chain of them, each of which shares a subnetwork with the next
        chain = [tuple(sorted((unit * (p - 1) + i) % k for i in range(p))) for unit in range(len(costs))]
        holders = chain if num_components(chain, k) == 1 else holders
    return _permuted(holders, list(alike.values()), k, seed)


class _Variant(NamedTuple):
    """How an attempt places leftover units.

    Args:
        even: whether blocks are even in residue classes, so that few units spread evenly.
        windows: whether leftover units use windows of neighbors, which connect few units best.
        random: whether leftover units start at random translates.
        all_move: whether other units may move as well, which helps with unequal groups of neurons.
    """

    seed: int
    even: bool
    windows: bool
    random: bool
    all_move: bool

    @classmethod
    def of(cls, number: int) -> _Variant:
        """The variant of an attempt: all combinations in turn, random ones last."""
        return cls(number, even=number % 3 != 1, windows=number % 3 == 2, random=number >= 6, all_move=number % 4 == 3)


class _Movable(NamedTuple):
    """A unit that may move.

    Args:
        table: 0/1 table of `choice`, [n, k].
        need: key of the need that the unit meets.
    """

    unit: int
    choice: list[Subnetworks]
    table: Ints
    need: str | None


class _Attempt:
    """One attempt at an assignment.

    Args:
        amounts: to balance, [U, m].
    """

    def __init__(
        self,
        classes: Mapping[UnitClass, list[int]],
        amounts: Ints,
        k: int,
        variant: _Variant,
        wanted: Collection[int],
    ) -> None:
        self.k, self._amounts, self._variant = k, amounts, variant
        # Units by need: every subnetwork needs one unit of each list.
        self._needs: dict[str | None, list[int]] = {None: [*range(len(amounts))]}
        if wanted:
            self._needs[_WANTED] = [*wanted]
        for of_units, units in classes.items():
            if of_units.branch is not None:
                self._needs.setdefault(of_units.branch, []).extend(units)
        self.holders: list[Subnetworks] = [tuple(range(k))] * len(amounts)
        self._movable: list[_Movable] = []
        self._shuffler = random.Random(variant.seed)
        numbers = sorted({of_units.p for of_units in classes if of_units.p < k})
        self._max_sets = max(MAX_SETS_PER_RANK, *numbers, 0)
        for p in numbers:
            of_p = {of_units: units for of_units, units in classes.items() if of_units.p == p}
            self._place(of_p, p, max(1, MAX_SETS_PER_RANK // (p * len(numbers))), wanted)

    def _place(self, classes: Mapping[UnitClass, list[int]], p: int, max_blocks: int, wanted: Collection[int]) -> None:
        """Assign all units of classes with p holders."""
        k, variant = self.k, self._variant
        blocks = base_blocks(k, p, max_blocks, _even_divisors(classes, p, k) if variant.even else ())
        blocks_of_leftovers = (tuple(range(p)),) if variant.windows else blocks
        sets = [holders for block in blocks for holders in translates(block, k)]
        choice = [holders for block in blocks_of_leftovers for holders in translates(block, k)]
        table = np.concatenate([_table(block, k) for block in blocks_of_leftovers])
        num_placed = 0
        for of_units, units in sorted(classes.items(), key=lambda item: -int(self._amounts[item[1]].sum())):
            num_whole, num_left = len(units) // k * k, len(units) % k  # in whole rounds of k, and left over
            turn = self._shuffler.randrange(k)
            for i, unit in enumerate(units[:num_whole]):
                in_round = num_placed + i - i % k  # units of this class and earlier ones before this round
                self.holders[unit] = sets[(in_round + (i + turn) % k) % len(sets)]
            if variant.random:
                places = self._shuffler.sample(range(len(choice)), num_left)
            else:
                begin = (num_placed + num_whole) % len(choice)
                places = [begin + (turn + i * k // num_left) % k for i in range(num_left)]
            for unit, place in zip(units[num_whole:], places, strict=True):
                self.holders[unit] = choice[place]
            for unit in units[0 if variant.all_move else num_whole :]:
                need = _WANTED if unit in wanted else of_units.branch
                self._movable.append(_Movable(unit, choice, table, need))
            num_placed += max(num_whole, k)

    def balance(self) -> None:
        """Move units to the translates that reduce the sum of squared loads most, for a few sweeps. No subnetwork loses
        the last unit that it needs, and the graph stays connected."""
        k, holders = self.k, list(self.holders)
        rows = incidence(holders, k)
        loads = rows.T @ self._amounts
        held = {name: rows[units].sum(axis=0) for name, units in self._needs.items()}
        for _ in range(_SWEEPS):
            if _imbalance(loads).max() <= _GOOD and all(counts.all() for counts in held.values()):
                break
            for unit, choice, table, need in self._movable:
                change = table - rows[unit]
                amount = self._amounts[unit]
                counts = held[need]
                lost = (counts + change == 0).sum(axis=1) - (counts == 0).sum()
                gain = 2 * change @ (loads @ amount) + (change**2).sum(axis=1) * (amount @ amount) + lost * _NEED
                best = int(gain.argmin())
                if gain[best] < 0:
                    holders[unit] = choice[best]
                    loads += np.outer(change[best], amount)
                    counts += change[best]
                    rows[unit] = table[best]
        if num_components(holders, k) <= num_components(self.holders, k):
            self.holders = holders

    def flaws(self) -> tuple[int, ...]:
        """Flaws, most severe first: subnetworks without a unit that they need; components of the graph; imbalance above
        1.05 of each amount, in steps of 5%; number of holder sets of a subnetwork above eight and p."""
        k, rows = self.k, incidence(self.holders, self.k)
        num_sets = int(incidence([*dict.fromkeys(self.holders)], k).sum(axis=0).max())
        return (
            sum(int((rows[units].sum(axis=0) == 0).sum()) for units in self._needs.values()),
            num_components(self.holders, k),
            *(max(0, int(np.ceil((excess - _BALANCED) / 0.05))) for excess in _imbalance(rows.T @ self._amounts)),
            max(0, num_sets - self._max_sets),
        )


def _even_divisors(classes: Mapping[UnitClass, list[int]], p: int, k: int) -> tuple[int, ...]:
    """Divisors of k in whose residue classes a block should be even (`base_blocks`): steps between the translates of
    the leftover units of a class of blocks, or of a small class."""
    steps = set()
    for of_units, units in classes.items():
        if of_units.branch is None or len(units) * p <= 2 * k:
            steps.add(k // gcd(len(units), k))
    return tuple(sorted(step for step in steps if p % step == 0))


def _imbalance(loads: Ints) -> NDArray[np.float64]:
    """Max/mean of loads [k, m]; [m]."""
    imbalance: NDArray[np.float64] = loads.max(axis=0) * len(loads) / np.maximum(1, loads.sum(axis=0))
    return imbalance


def _amounts(costs: Sequence[UnitCost], num_holders: Sequence[int], balance_elements: bool) -> Ints:
    """Amounts to balance, [U, 1 or 2]: FLOPs with a small share of bytes; elements that the replicas of a subnetwork
    own. Integers, so that results are equal on all machines."""

    def shares(values: Sequence[int], scale: int) -> Ints:
        total = max(1, sum(values))
        return np.array([value * scale // total for value in values], dtype=np.int64)

    flops = shares([cost.flops for cost in costs], 1 << 21) + shares([cost.num_bytes for cost in costs], 1 << 13)
    owned = [(cost.num_parameters << 16) // p for cost, p in zip(costs, num_holders, strict=True)]
    return np.stack([flops, shares(owned, 1 << 21)][: 1 + balance_elements], axis=1)


def _permuted(holders: Sequence[Subnetworks], alike: Sequence[list[int]], k: int, seed: int) -> tuple[Subnetworks, ...]:
    """Shuffle the sets of equal units, and rotate all subnetworks if that keeps the sets."""
    shuffler = random.Random(seed)
    result = list(holders)
    for units in alike:
        sets = [holders[unit] for unit in units]
        shuffler.shuffle(sets)
        for unit, subnetworks in zip(units, sets, strict=True):
            result[unit] = subnetworks
    turn = shuffler.randrange(k)
    turned = {
        subnetworks: tuple(sorted((subnetwork + turn) % k for subnetwork in subnetworks)) for subnetworks in {*result}
    }
    keeps_sets = {*turned.values()} == {*turned}
    return tuple(turned[subnetworks] for subnetworks in result) if keeps_sets else tuple(result)
