"""Which subnetworks hold which unit: "balanced" and "cyclic". Pure, and integers only.

Every rank computes the assignment on its own, so nothing here may depend on the platform: no floating
point decides, no set or dict order, no clock. The search is bounded by counts of trials.

Words: a table is a 0/1 matrix [U, k] of units by subnetworks with p ones in each row.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.assignment.deal import deal
from sdp_deepspeed.plan.assignment.graph import Holders, connect, incidence, to_holders
from sdp_deepspeed.plan.assignment.problem import Branches, Problem, branch_codes
from sdp_deepspeed.plan.assignment.rounds import SETS_PER_SUBNETWORK
from sdp_deepspeed.plan.assignment.search import search
from sdp_deepspeed.units import UnitCost

Table = NDArray[np.int64]


_SHARE = 2**16  # one branch's units together, in the integers that `cyclic` turns windows by


def balanced(
    costs: Sequence[UnitCost],
    *,
    num_subnetworks: int,
    num_holders: int,
    seed: int = 0,
    branches: Branches | None = None,
) -> Holders:
    """Balance FLOPs, then bytes, then spread the pairs of subnetworks that share units (plan/README.md).

    With branches, the m units of each are held by as equally many per subnetwork as m p / k allows, unless FLOPs
    cannot be balanced to 5% like that.

    Args:
        costs: cost of each of the U units.
        num_subnetworks: k.
        num_holders: p, at most k.
        seed: renames subnetworks, and units of equal cost (and branch); balance and spectral gap do not depend on it.
        branches: for each unit the name of the branch of which every subnetwork must keep a unit, None for block
            units; None if all are block units.

    Returns:
        For each unit its p subnetworks, ascending: at most 4k different sets. The graph is connected whenever
        U (p-1) >= k-1.

    Raises:
        ValueError: U p < k, or m p < k for a branch: some subnetworks would have no unit, or none of that branch.
    """
    k, p = num_subnetworks, num_holders
    _check_counts(len(costs), k, p, branches)
    if p == k:
        return (tuple(range(k)),) * len(costs)
    if min(len(costs), comb(k, p)) <= SETS_PER_SUBNETWORK * k:  # no table has more sets
        table = search(costs, k, p, branches)
    else:
        table = deal(Problem.of(costs, k, p, branches))
    return to_holders(renamed(table, costs, branch_codes(branches, len(costs)), seed))


def cyclic(num_units: int, *, num_subnetworks: int, num_holders: int, branches: Branches | None = None) -> Holders:
    """Windows of p neighboring subnetworks: unit u starts at u mod k.

    The last round, when fewer than k units are left for it, spreads its starts evenly, so that every
    subnetwork has a unit whenever U p >= k and the graph is connected whenever U (p-1) >= k-1.

    The units of each branch have such windows of their own, turned to where the branches before left most room. If
    these do not meet, single units trade places until the graph is connected.

    Args, returns, raises: as `balanced`.
    """
    k, p = num_subnetworks, num_holders
    _check_counts(num_units, k, p, branches)
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


def _check_counts(num_units: int, k: int, p: int, branches: Branches | None) -> None:
    if not 1 <= p <= k:
        raise ValueError(f"holders must be 1 to {k} (the number of subnetworks), got {p}")
    if branches is not None:
        _check_branches(branches, num_units, k, p)
    if num_units * p < k:
        raise ValueError(
            f"{num_units} units with {p} holders each cannot give each of {k} subnetworks a unit; "
            f"use {-(-k // max(1, num_units))} or more holders, fewer subnetworks, a deeper model, or finer units"
        )


def _check_branches(branches: Branches, num_units: int, k: int, p: int) -> None:
    if len(branches) != num_units:
        raise ValueError(f"branches must name one branch, or None, for each of {num_units} units; got {len(branches)}")
    sizes = Counter(name for name in branches if name is not None)
    short = [name for name, size in sizes.items() if size * p < k]
    if short:
        fewest = min(sizes[name] for name in short)
        raise ValueError(
            f"branch {quoted(short, limit=1)}: {sizes[short[0]]} units with {p} holders each cannot give each of {k} "
            f"subnetworks a unit of that branch; use {-(-k // fewest)} or more holders, for an MLP more neuron_groups, "
            'strategy "block" for that part, such as {"attention": "block", "mlp": "neuron"}, or fewer subnetworks'
        )


def renamed(
    table: Table, costs: Sequence[UnitCost], codes: Table, seed: int, groups: Sequence[Sequence[int]] | None = None
) -> Table:
    """Permute subnetworks, and units among those of equal cost and branch; seed 0 changes nothing.

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
    alike: dict[tuple[UnitCost, int], list[int]] = {}
    for unit, cost in enumerate(costs):
        alike.setdefault((cost, int(codes[unit])), []).append(unit)
    for same in alike.values():
        _shuffle(rows, same, shuffler)
    return table[rows][:, columns]


def _shuffle(items: list[int], places: Sequence[int], shuffler: random.Random) -> None:
    """Let each of `places` hold one of them, in place."""
    shuffled = list(places)
    shuffler.shuffle(shuffled)
    for place, source in zip(list(places), shuffled, strict=True):
        items[place] = source
