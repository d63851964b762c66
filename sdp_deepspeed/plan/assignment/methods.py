"""Which subnetworks hold which unit: "balanced" and "cyclic". Pure, and integers only.

Every rank computes the assignment on its own, so nothing here may depend on the platform: no floating
point decides, no set or dict order, no clock. The search is bounded by counts of trials.

Words: a table is a 0/1 matrix [U, k] of units by subnetworks with p ones in the row of a unit with p holders.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.assignment.deal import deal
from sdp_deepspeed.plan.assignment.graph import Holders, connect, incidence, to_holders
from sdp_deepspeed.plan.assignment.problem import Branches, Problem, branch_codes
from sdp_deepspeed.plan.assignment.rounds import SETS_PER_SUBNETWORK
from sdp_deepspeed.plan.assignment.search import search
from sdp_deepspeed.plan.holders import in_words
from sdp_deepspeed.units import UnitCost

Table = NDArray[np.int64]


_SHARE = 2**16  # one branch's units together, in the integers that `cyclic` turns windows by


def balanced(
    costs: Sequence[UnitCost],
    *,
    num_subnetworks: int,
    num_holders: int | Sequence[int],
    seed: int = 0,
    branches: Branches | None = None,
) -> Holders:
    """Balance FLOPs, then bytes, then spread the pairs of subnetworks that share units (plan/README.md).

    With branches, the units of each are held by as equally many per subnetwork as their p allow, unless FLOPs cannot be
    balanced to 5% like that.

    Args:
        costs: cost of each of the U units.
        num_subnetworks: k.
        num_holders: p, at most k, of all units or of each.
        seed: renames subnetworks, and units of equal cost (and branch); balance and spectral gap do not depend on it.
        branches: for each unit the name of the branch of which every subnetwork must keep a unit, None for block
            units; None if all are block units.

    Returns:
        For each unit its p subnetworks, ascending: at most 4k different sets, or a round for each p if that is more.
        The graph is connected whenever the p - 1 of all units together are k - 1 or more.

    Raises:
        ValueError: fewer than k holders in all, or of a branch: some subnetworks would have no unit, or none of that
            branch.
    """
    k, p = num_subnetworks, _of_each(num_holders, len(costs))
    _check_counts(p, k, branches)
    table = np.ones((len(costs), k), dtype=np.int64)
    cut = [unit for unit, n in enumerate(p) if n < k]  # the others load all subnetworks alike
    if not cut:
        return to_holders(table)
    of_cut = None if branches is None else [branches[unit] for unit in cut]
    served = set() if branches is None else {branches[unit] for unit, n in enumerate(p) if n == k}
    table[cut] = _searched_or_dealt([costs[unit] for unit in cut], k, [p[unit] for unit in cut], of_cut, served)
    return to_holders(renamed(table, costs, branch_codes(branches, len(costs)), seed))


def _searched_or_dealt(
    costs: Sequence[UnitCost], k: int, p: Sequence[int], branches: Branches | None, served: Collection[str | None]
) -> Table:
    """Of branches that are `served` every subnetwork has a whole unit."""
    most = SETS_PER_SUBNETWORK * k
    if min(len(costs), sum(comb(k, n) for n in set(p))) <= most:  # no table has more sets
        return search(costs, k, p, branches)
    if branches is not None:
        _check_branches_by_holders([None if name in served else name for name in branches], p, k, most)
    return deal(Problem.of(costs, k, p, branches))


def cyclic(num_units: int, *, num_subnetworks: int, num_holders: int, branches: Branches | None = None) -> Holders:
    """Windows of p neighboring subnetworks: unit u starts at u mod k.

    The last round, when fewer than k units are left for it, spreads its starts evenly, so that every
    subnetwork has a unit whenever U p >= k and the graph is connected whenever U (p-1) >= k-1.

    The units of each branch have such windows of their own, turned to where the branches before left most room. If
    these do not meet, single units trade places until the graph is connected.

    Args, returns, raises: as `balanced`.
    """
    k, p = num_subnetworks, num_holders
    _check_counts((p,) * num_units, k, branches)
    codes = branch_codes(branches, num_units)
    table = np.zeros((num_units, k), dtype=np.int64)
    held, seen = np.zeros(k, dtype=np.int64), Counter[int]()
    for code in range(int(codes.max()) + 1):
        units = np.flatnonzero(codes == code)
        windows = _windows(len(units), k, p)
        share = windows.sum(axis=0) * (_SHARE if code == 0 else _SHARE // len(units))
        turn = _best_turn(held, share, seen[len(units)])
        seen[len(units)] += 1
        held += np.roll(share, turn)
        table[units] = np.roll(windows, turn, axis=1)
    if codes.any():
        connect(table, np.ones((num_units, 2), dtype=np.int64), codes)
    return to_holders(table)


def _windows(num_units: int, k: int, p: int) -> Table:
    whole_rounds, left = divmod(num_units, k)
    starts = list(range(k)) * whole_rounds + [i * k // left for i in range(left)]
    return incidence([[(start + j) % k for j in range(p)] for start in starts], k)


def _best_turn(held: Table, share: Table, first: int) -> int:
    """By how many subnetworks to turn `share`, [k], so that it adds to the least of `held`, [k].

    Of equally good turns the first from `first` on: branches of one shape then differ, and so do their pairs.
    """
    turns = [(first + i) % len(held) for i in range(len(held))]
    return min(turns, key=lambda turn: int(held @ np.roll(share, turn)))


def _of_each(num_holders: int | Sequence[int], num_units: int) -> tuple[int, ...]:
    if isinstance(num_holders, int):
        return (num_holders,) * num_units
    if len(num_holders) != num_units:
        raise ValueError(f"holders must be one number, or one for each of {num_units} units; got {len(num_holders)}")
    return tuple(num_holders)


def _check_counts(p: Sequence[int], k: int, branches: Branches | None) -> None:
    for number in sorted({*p}):
        if not 1 <= number <= k:
            raise ValueError(f"holders must be 1 to {k} (the number of subnetworks), got {number}")
    if branches is not None:
        _check_branches(branches, p, k)
    if sum(p) < k:
        fewest = -(-k // max(1, len(p)))
        raise ValueError(
            f"{len(p)} units with {in_words(p)} cannot give each of {k} subnetworks a unit; "
            f"use {fewest} or more holders, fewer subnetworks, a deeper model, or finer units"
        )


def _check_branches(branches: Branches, p: Sequence[int], k: int) -> None:
    if len(branches) != len(p):
        raise ValueError(f"branches must name one branch, or None, for each of {len(p)} units; got {len(branches)}")
    holders = _holders_by_branch(zip(branches, p, strict=True))
    short = [name for name, held in holders.items() if sum(held) < k]
    if short:
        fewest = min(len(holders[name]) for name in short)
        raise ValueError(
            f"branch {quoted(short, limit=1)}: {len(holders[short[0]])} units with {in_words(holders[short[0]])} "
            f"cannot give each of {k} subnetworks a unit of that branch; use {-(-k // fewest)} or more holders, for an "
            'MLP more neuron_groups, strategy "block" for that part, such as {"attention": "block", "mlp": "neuron"}, '
            "or fewer subnetworks"
        )


def _check_branches_by_holders(branches: Branches, p: Sequence[int], k: int, most: int) -> None:
    """So many units are dealt out, those of one branch with one p at a time."""
    by_holders = _holders_by_branch(((name and (name, n)), n) for name, n in zip(branches, p, strict=True))
    for (name, n), held in by_holders.items():
        if sum(held) < k:
            raise ValueError(
                f"branch {name!r}: its units have different numbers of holders, and only {len(held)} have {n}, too few "
                f"to give each of {k} subnetworks one; with more than {most} units, give all of a branch the same"
            )


def _holders_by_branch(named: Iterable[tuple[Any, int]]) -> dict[Any, list[int]]:
    found: dict[Any, list[int]] = {}
    for name, p in named:
        if name is not None:
            found.setdefault(name, []).append(p)
    return found


def renamed(
    table: Table,
    costs: Sequence[UnitCost],
    codes: Table,
    seed: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> Table:
    """Permute subnetworks, and units among those of equal cost, holders and branch; seed 0 changes nothing.

    Args:
        table: [U, k].
        costs: of the units.
        codes: branches of the units, [U].
        seed: of the permutation.
        groups: subnetworks that trade names; None if all may.
    """
    if seed == 0:
        return table
    shuffler = random.Random(seed)
    columns = list(range(table.shape[1]))
    for group in groups or [columns]:
        _shuffle(columns, group, shuffler)
    rows = list(range(len(costs)))
    alike: dict[tuple[UnitCost, int, int], list[int]] = {}
    for unit, (cost, num_holders) in enumerate(zip(costs, table.sum(axis=1).tolist(), strict=True)):
        alike.setdefault((cost, num_holders, int(codes[unit])), []).append(unit)
    for same in alike.values():
        _shuffle(rows, same, shuffler)
    return table[rows][:, columns]


def _shuffle(items: list[int], places: Sequence[int], shuffler: random.Random) -> None:
    """Let each of `places` hold one of them, in place."""
    shuffled = list(places)
    shuffler.shuffle(shuffled)
    for place, source in zip(list(places), shuffled, strict=True):
        items[place] = source
