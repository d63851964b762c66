"""Which subnetworks hold which unit: cyclic translates of a base block.

A base block is a set B of p elements of Z_k; its k translates B + t are the holder sets. How often two subnetworks
share a unit depends on their difference only, and equals how often that difference occurs within B: the flatter these
counts, the closer the spectral gap comes to its bound k (p-1) / (p (k-1)). k equal units are balanced exactly.
Small p take several base blocks, as many as raise the gap and keep a rank in at most eight holder sets.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations, permutations, product
from math import comb, factorial, gcd, prod

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.units import UnitCost

Ints = NDArray[np.int64]
Holders = tuple[int, ...]
Block = tuple[int, ...]

MAX_SETS_PER_RANK = 8
_BALANCED = 1.05  # FLOPs, max over mean
_FEW_WAYS = 1000
_MAX_TURNS = 128  # of ways at random: their number times k
_MAX_TRIES, _MAX_WORK = 8, 4096  # tries; units times subnetworks in all of them
_WAYS = (
    "together",  # units that make up no round of their kind share rounds
    "exact",  # of each kind evenly spread translates where these are exactly balanced, the others together
    "spread",  # of each kind evenly spread translates
    "windows together",  # as "together", of windows of neighbors
    "windows spread",
)
_EXHAUSTIVE = 150_000  # candidates times k; beyond that a local search
_SWAPS, _PATIENCE = 256, 6  # of the local search: candidates per step, steps without success


def spectral_gap(holders: Sequence[Holders], weights: Sequence[int], num_subnetworks: int) -> float:
    """1 - lambda_2 of W_ij = sum over units of w_u m_iu m_ju / p_u, rows normalized (DESIGN.md, section 1).

    Args:
        holders: for each unit its subnetworks.
        weights: trainable elements of each unit; a unit with none connects nothing.

    Returns:
        0.0 if the graph of subnetworks and units falls apart, 1.0 if every subnetwork holds everything.
    """
    k = num_subnetworks
    if k == 1:
        return 1.0
    shares: dict[Holders, float] = {}
    for subnetworks, weight in zip(holders, weights, strict=True):
        shares[subnetworks] = shares.get(subnetworks, 0.0) + weight / len(subnetworks)
    sets = [subnetworks for subnetworks, share in shares.items() if share > 0]
    if num_components(sets, k) > 1:
        return 0.0
    table = incidence(sets, k)
    overlaps = (table.T * np.array([shares[one] for one in sets])) @ table
    # W is similar to this symmetric matrix.
    sums = overlaps.sum(axis=1)
    return float(np.clip(1.0 - np.linalg.eigvalsh(overlaps / np.sqrt(np.outer(sums, sums)))[-2], 0.0, 1.0))


def incidence(holders: Sequence[Holders], num_subnetworks: int) -> Ints:
    """The table of units by subnetworks, 0 or 1, [U, k]."""
    table = np.zeros((len(holders), num_subnetworks), dtype=np.int64)
    rows = np.repeat(np.arange(len(holders)), [len(subnetworks) for subnetworks in holders])
    table[rows, [one for subnetworks in holders for one in subnetworks]] = 1
    return table


def num_components(holders: Iterable[Holders], num_subnetworks: int) -> int:
    """Connected components of the bipartite graph of subnetworks and units; a subnetwork without units is one."""
    parts = [1 << one for one in range(num_subnetworks)]
    for subnetworks in dict.fromkeys(holders):
        mask = sum(1 << one for one in subnetworks)
        met = [part for part in parts if part & mask]
        if len(met) > 1:
            parts = [part for part in parts if not part & mask] + [sum(met)]
    return len(parts)


@lru_cache(maxsize=512)
def base_blocks(k: int, p: int, most: int = 1, even: tuple[int, ...] = ()) -> tuple[Block, ...]:
    """Base blocks of p elements of Z_k, the flattest first.

    Args:
        k, p: with 1 <= p < k.
        most: how many at most; only as many as the largest spectral gap takes.
        even: divisors of k; blocks have equally many elements in each residue class of these, as far as possible. Then
            the translates by multiples of such a divisor cover all of Z_k equally often.
    """
    if 2 * p > k:  # a complement's difference counts are as flat
        return tuple(_complement(block, k) for block in base_blocks(k, k - p, most, even))
    blocks: list[Block] = []
    gaps: list[float] = []
    spectrum = np.zeros(k // 2 + 1)
    while len(blocks) < most:
        blocks.append(_flattest(k, p, spectrum, even))
        spectrum = spectrum + np.abs(np.fft.rfft(_indicator(blocks[-1:], k)[0])) ** 2
        gaps.append(round(1 - float(spectrum[1:].max()) / (len(blocks) * p * p), 6))
    return tuple(blocks[: gaps.index(max(gaps)) + 1])


def _flattest(k: int, p: int, spectrum: NDArray[np.float64], even: tuple[int, ...]) -> Block:
    """The block that is best beside those whose power spectra add up to `spectrum`."""
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
        block, found = swaps[first], tuple(float(score[first]) for score in reversed(scores))
        failures = failures + 1 if best == found else 0
        best = found
    return tuple(sorted((one - min(block)) % k for one in block))


def _scores(
    table: Ints, spectrum: NDArray[np.float64], even: tuple[int, ...]
) -> tuple[Ints | NDArray[np.float64], ...]:
    """What to minimize, the last one first: uneven residues, squares of difference counts, 1 - gap; [n] each."""
    n, k = table.shape
    power = np.abs(np.fft.rfft(table, axis=1)) ** 2 + spectrum
    differences = np.rint(np.fft.irfft(power, k, axis=1)).astype(np.int64)[:, 1:]
    uneven = np.zeros(n, dtype=np.int64)
    for divisor in even:
        uneven += (table.reshape(n, k // divisor, divisor).sum(axis=1) ** 2).sum(axis=1)
    return np.round(power[:, 1:].max(axis=1), 6), (differences**2).sum(axis=1), uneven


def _indicator(blocks: Sequence[Block], k: int) -> Ints:
    table = np.zeros((len(blocks), k), dtype=np.int64)
    np.put_along_axis(table, np.array(blocks), 1, axis=1)
    return table


def _complement(block: Block, k: int) -> Block:
    return tuple(sorted(set(range(k)).difference(block)))


@lru_cache(maxsize=512)
def translates(block: Block, k: int) -> tuple[Holders, ...]:
    """B + t for t from 0 to k - 1, each ascending."""
    return tuple(tuple(sorted((one + t) % k for one in block)) for t in range(k))


@lru_cache(maxsize=512)
def _table(block: Block, k: int) -> Ints:
    return incidence(translates(block, k), k)


def assign(
    costs: Sequence[UnitCost],
    num_holders: Sequence[int],
    num_subnetworks: int,
    *,
    seed: int = 0,
    branches: Sequence[str | None] | None = None,
) -> tuple[Holders, ...]:
    """Holders of each unit, ascending; deterministic.

    Of units of a kind as many as possible are dealt to all translates in turn. The rest is dealt in several ways; the
    one is taken that connects the subnetworks, balances FLOPs within 5%, and has the largest spectral gap.

    Args:
        costs: of the units, in model order.
        num_holders: p of each, 1 to k.
        num_subnetworks: k.
        seed: permutes which of equal units gets which translate; the holder sets stay the same.
        branches: of units of neurons or heads the branch of which every subnetwork needs one; None for blocks.
    """
    kinds: dict[tuple[int, UnitCost | str], list[int]] = {}
    branches = [None] * len(costs) if branches is None else branches
    for unit, (cost, p, branch) in enumerate(zip(costs, num_holders, branches, strict=True)):
        kinds.setdefault((p, cost if branch is None else branch), []).append(unit)
    k = num_subnetworks
    rest = sum(len(units) % k for (_, kind), units in kinds.items() if isinstance(kind, UnitCost))
    tries, best = min(_MAX_TRIES, 1 + _MAX_WORK // (1 + rest * k)), None
    ways = [(way, i) for way in _WAYS for i in range(tries if rest and "together" in way else 1)]
    for way, shuffle in ways:
        deal = _deal(costs, kinds, k, way, shuffle)
        flaws = deal.flaws()
        best = (flaws, deal) if best is None or flaws < best[0] else best
        if not rest and best[0][:2] == (1, 0):
            break
    assert best is not None
    return _permuted(best[1], costs, seed)


def _deal(
    costs: Sequence[UnitCost], kinds: dict[tuple[int, UnitCost | str], list[int]], k: int, way: str, shuffle: int
) -> _Deal:
    """
    Args:
        kinds: units by p and by their cost (blocks) or branch.
        way: of `_WAYS`.
        shuffle: another number begins with another order of sets.
    """
    deal = _Deal(k, costs)
    numbers = sorted({p for p, _ in kinds if p < k})
    for p in numbers:
        most = max(1, MAX_SETS_PER_RANK // (p * len(numbers)))
        steps = {
            k // gcd(len(units), k)
            for (n, kind), units in kinds.items()
            if n == p and (way in ("exact", "spread") or (isinstance(kind, str) and len(units) * p < 2 * k))
        }
        even = tuple(sorted(step for step in steps if p % step == 0))
        deal.blocks[p] = (tuple(range(p)),) if "windows" in way else base_blocks(k, p, most, even)
    left: list[tuple[int, int]] = []
    for (p, kind), units in sorted(kinds.items(), key=lambda item: -int(deal.amounts[item[1]].sum())):
        if p == k:
            deal.give(units, [tuple(range(k))] * len(units))
            continue
        is_block = isinstance(kind, UnitCost)
        whole = len(units) // k * k if is_block else 0
        for start in range(0, whole, k):
            deal.give(units[start : start + k], translates(deal.next_block(p), k))
        is_exact = p * gcd(len(units), k) % k == 0  # evenly spread translates then load all alike
        if is_block and ("together" in way or ("exact" in way and not is_exact)):
            left += [(unit, p) for unit in units[whole:]]
        elif units[whole:]:
            deal.give_spread(units[whole:], p)
    deal.give_by_load(left, random.Random(shuffle) if shuffle else None)
    deal.rebalance(
        [(p, units[len(units) // k * k :], isinstance(kind, str)) for (p, kind), units in kinds.items() if p < k]
    )
    return deal


def _amounts(costs: Sequence[UnitCost]) -> Ints:
    """What to balance: FLOPs, and a little of the bytes; whole numbers, so that all machines decide alike."""
    flops, size = max(1, *(c.flops for c in costs), 1), max(1, *(c.num_bytes for c in costs), 1)
    return np.array([(cost.flops << 16) // flops + (cost.num_bytes << 6) // size for cost in costs], dtype=np.int64)


class _Deal:
    """Units that have got their sets so far.

    Args:
        k: number of subnetworks.
        costs: of the units, U of them.
    """

    def __init__(self, k: int, costs: Sequence[UnitCost]) -> None:
        self.k, self.amounts = k, _amounts(costs)
        self.blocks: dict[int, tuple[Block, ...]] = {}
        self.chosen: list[Holders] = [()] * len(costs)
        self.rounds: list[list[int]] = []  # units that may trade their sets if they are equal
        self._loads, self._weights = np.zeros(k, dtype=np.int64), [cost.num_parameters for cost in costs]
        self._used: dict[Block, Ints] = {}
        self._num_rounds: dict[int, int] = {}

    def flaws(self) -> tuple[int, int, float]:
        """Components of the graph of subnetworks and units, imbalance in steps of 5%, 1 - spectral gap."""
        excess = float(self._loads.max() * self.k / max(1, self._loads.sum())) - _BALANCED
        gap = spectral_gap(self.chosen, self._weights, self.k)
        return num_components(self.chosen, self.k), max(0, int(np.ceil(excess / 0.05))), round(1 - gap, 6)

    def give(self, units: Sequence[int], sets: Sequence[Holders]) -> None:
        """Give each of `units` its set."""
        self.rounds.append(list(units))
        self._loads += incidence(sets, self.k).T @ self.amounts[list(units)]
        for unit, one in zip(units, sets, strict=True):
            self.chosen[unit] = one

    def next_block(self, p: int) -> Block:
        """Of a round: the base blocks in turn."""
        self._num_rounds[p] = self._num_rounds.get(p, -1) + 1
        return self.blocks[p][self._num_rounds[p] % len(self.blocks[p])]

    def give_spread(self, units: list[int], p: int) -> None:
        """Give to units of a kind whole rounds and evenly spread translates, turned to where loads are least."""
        k, whole = self.k, len(units) // self.k
        parts = [(block, t) for block in [self.next_block(p) for _ in range(whole)] for t in range(k)]
        rests: list[list[tuple[Block, int]]] = [[]]
        if len(units) % k:
            first = self.next_block(p)
            blocks = (first, *(block for block in self.blocks[p] if block != first))
            rests = _spread(blocks, k, len(units) % k, num_drawn=_MAX_TURNS // k)
        turns, above, best = (np.arange(k) - np.arange(k)[:, None]) % k, self._loads - self._loads.min(), []
        for rest in rests:
            added = self.amounts[units] @ np.stack([_table(block, k)[t] for block, t in (*parts, *rest)])
            change, used = 2 * added[turns] @ above + (added**2).sum(), np.zeros(k, dtype=np.int64)
            for block, t in rest:  # of what loads alike the sets that are used the least
                used += self._used.setdefault(block, np.zeros(k, dtype=np.int64))[(t + np.arange(k)) % k]
            turn = int(np.lexsort((used, change))[0])
            best.append((int(change[turn]), int(used[turn]), turn))
        chosen = min(range(len(rests)), key=best.__getitem__)
        turn = best[chosen][-1]
        for block, t in rests[chosen]:
            self._used[block][(t + turn) % k] += 1
        self.give(units, [translates(block, k)[(t + turn) % k] for block, t in (*parts, *rests[chosen])])

    def give_by_load(self, units_and_holders: list[tuple[int, int]], shuffler: random.Random | None) -> None:
        """Give to blocks that share rounds: the heaviest first, each the set with the least load."""
        order = sorted(units_and_holders, key=lambda item: -self.amounts[item[0]])
        free: dict[int, list[Holders]] = {}
        for p in sorted({p for _, p in order}, reverse=True):
            count = sum(n == p for _, n in order)
            free[p] = [one for _ in range(count // self.k) for one in translates(self.next_block(p), self.k)]
            if count % self.k:
                before = [one for one in (*self.chosen, *(one for sets in free.values() for one in sets)) if one]
                parts = _spread(self.blocks[p], self.k, count % self.k, tuple(dict.fromkeys(before)))[0]
                free[p] += [translates(block, self.k)[t] for block, t in parts]
            if shuffler is not None:
                shuffler.shuffle(free[p])
        sets, loads = [], self._loads.copy()
        for unit, p in order:
            least = 0 if shuffler else min(range(len(free[p])), key=lambda i: loads[list(free[p][i])].sum())
            sets.append(free[p].pop(least))
            loads[list(sets[-1])] += self.amounts[unit]
        if order:
            units = [unit for unit, _ in order]
            self.give(units, _traded(self.amounts[units], sets, loads)[0])

    def rebalance(self, rests: list[tuple[int, list[int], bool]]) -> None:
        """Let single units change to another translate as long as FLOPs are not balanced and that lowers the squares of
        the loads.

        Args:
            rests: of each kind p, the units that make up no round, and whether they are of one branch, of which every
                subnetwork keeps a unit.
        """
        k, chosen, loads = self.k, list(self.chosen), self._loads.copy()
        all_sets = {p: [one for block in blocks for one in translates(block, k)] for p, blocks in self.blocks.items()}
        tables = {p: incidence(sets, k) for p, sets in all_sets.items()}
        for _ in range(_MAX_TRIES):
            before = list(chosen)
            for p, units, is_branch in rests:
                held = incidence([chosen[unit] for unit in units] if is_branch else chosen, k).sum(axis=0)
                for unit in units if loads.max() * k > _BALANCED * loads.sum() else ():
                    own, amount = incidence([chosen[unit]], k)[0], self.amounts[unit]
                    rows = tables[p] - own
                    change = amount * (2 * rows @ (loads - loads.min()) + amount * (rows**2).sum(axis=1))
                    change[~tables[p][:, held == own].all(axis=1)] = 0  # a subnetwork would be left without a unit
                    best = int(change.argmin())
                    if change[best] < 0:
                        chosen[unit] = all_sets[p][best]
                        loads, held = loads + amount * rows[best], held + rows[best]
            blocks = [unit for _, units, is_branch in rests if not is_branch for unit in units]
            if chosen == before or not blocks:
                break
            sets, loads = _traded(self.amounts[blocks], [chosen[unit] for unit in blocks], loads)
            for unit, one in zip(blocks, sets, strict=True):
                chosen[unit] = one
        if num_components(chosen, k) <= num_components(self.chosen, k):
            self.chosen, self._loads = chosen, loads


def _traded(amounts: Ints, sets: list[Holders], loads: Ints) -> tuple[list[Holders], Ints]:
    """Sets that units have after pairs of them traded as long as that lowers the squares of loads; and loads, [k]."""
    table, order, improves = incidence(sets, len(loads)), np.arange(len(sets)), True
    sizes = table.sum(axis=1)
    while improves:
        improves = False
        for i in range(len(sets)):
            more, rows = (amounts - amounts[i]) * (sizes == sizes[i]), table[i] - table
            change = more * (2 * rows @ (loads - loads.min()) + more * (rows**2).sum(axis=1))
            j = int(change.argmin())
            if change[j] < 0:
                improves, loads = True, loads + more[j] * rows[j]
                table[[i, j]], order[[i, j]] = table[[j, i]], order[[j, i]]
    return [sets[place] for place in order], loads


@lru_cache(maxsize=512)
def _spread(
    blocks: tuple[Block, ...], k: int, count: int, before: tuple[Holders, ...] = (), num_drawn: int = 0
) -> list[list[tuple[Block, int]]]:
    """Some ways to take fewer than k translates (B, t) of one of `blocks`, the most even one first; of a window of
    neighbors where only that reaches or connects more.

    Args:
        before: sets that exist; together with them as many subnetworks as possible have a unit, are connected, and have
            equally many units.
        num_drawn: ways at random, of each block.
    """
    held = incidence(before, k).sum(axis=0)

    def options(block: Block) -> list[list[tuple[Block, int]]]:
        """Translates at equal distances, each in turn the one that meets the fewest others, and some at random."""
        table = _table(block, k)
        first, loads, greedy = int((table @ held).argmin()), held.copy(), []
        for _ in range(count):
            greedy.append(int((table @ (loads + (loads > 0) * k * (count + len(before)))).argmin()))
            loads += table[greedy[-1]]
        shuffler = random.Random(0)
        drawn = [shuffler.sample(range(k), count) for _ in range(num_drawn)]
        return [[(block, t % k) for t in ts] for ts in ([first + i * k // count for i in range(count)], greedy, *drawn)]

    def flaws(option: list[tuple[Block, int]]) -> tuple[int, int, int]:
        loads = held + np.stack([_table(block, k)[t] for block, t in option]).sum(axis=0)
        sets = [*before, *(translates(block, k)[t] for block, t in option)]
        return int((loads == 0).sum()), num_components(sets, k), int((loads**2).sum())

    found = sorted((option for block in blocks for option in options(block)), key=flaws)
    windows = sorted(options(tuple(range(len(blocks[0])))), key=flaws)
    best = min(found, windows, key=lambda options: flaws(options[0])[:2])
    return [option for option in best if flaws(option)[:2] == flaws(best[0])[:2]]


def _permuted(deal: _Deal, costs: Sequence[UnitCost], seed: int) -> tuple[Holders, ...]:
    """Let equal units of a round trade their sets, and rename all subnetworks by a rotation that keeps the sets.

    Where there are few ways to trade, seeds that follow each other take different ones, until all were taken.
    """
    alike: dict[tuple[int, UnitCost, int], list[int]] = {}
    for number, units in enumerate(deal.rounds):
        for unit in units:
            alike.setdefault((number, costs[unit], len(deal.chosen[unit])), []).append(unit)
    order, sets = [unit for units in alike.values() for unit in units], dict(enumerate(deal.chosen))
    pools, shuffler = [[sets[unit] for unit in units] for units in alike.values()], random.Random(seed)
    if prod(factorial(len(pool)) for pool in pools) <= _FEW_WAYS:
        ways = list(dict.fromkeys(product(*map(permutations, pools))))
        random.Random(0).shuffle(ways)
        pools, turn = list(map(list, ways[seed % len(ways)])), 0
    else:
        for pool in pools:
            shuffler.shuffle(pool)
        turn = shuffler.randrange(deal.k)
    sets.update(zip(order, (one for pool in pools for one in pool), strict=True))
    turned = {one: tuple(sorted((number + turn) % deal.k for number in one)) for one in {*sets.values()}}
    keeps = {*turned.values()} == {*turned}
    return tuple(turned[one] if keeps else one for one in sets.values())
