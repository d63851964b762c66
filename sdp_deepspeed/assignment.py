"""Which subnetworks hold which unit: "balanced" and "cyclic". Pure, and integers only.

Every rank computes the assignment on its own, so nothing here may depend on the platform: no floating
point decides, no set or dict order, no clock. The search is bounded by counts of trials.

Words: a table is a 0/1 matrix [U, k] of units by subnetworks with p ones in each row.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdp_deepspeed.assignment_graph import num_components
from sdp_deepspeed.assignment_search import search
from sdp_deepspeed.units import UnitCost

Holders = tuple[tuple[int, ...], ...]
Table = NDArray[np.int64]


def balanced(costs: Sequence[UnitCost], *, num_subnetworks: int, num_holders: int, seed: int = 0) -> Holders:
    """Balance FLOPs, then bytes, then spread the pairs of subnetworks that share units (DESIGN.md section 1).

    Args:
        costs: cost of each of the U units.
        num_subnetworks: k.
        num_holders: p, at most k.
        seed: renames subnetworks, and units of equal cost; balance and spectral gap do not depend on it.

    Returns:
        For each unit its p subnetworks, ascending. The graph is connected whenever U (p-1) >= k-1.

    Raises:
        ValueError: U p < k, some subnetworks would have no unit.
    """
    k, p = num_subnetworks, num_holders
    _check_counts(len(costs), k, p)
    if p == k:
        return (tuple(range(k)),) * len(costs)
    table = search(costs, k, p)
    return to_holders(_renamed(table, costs, seed))


def cyclic(num_units: int, *, num_subnetworks: int, num_holders: int) -> Holders:
    """Windows of p neighbouring subnetworks: unit u starts at u mod k.

    The last round, when fewer than k units are left for it, spreads its starts evenly, so that every
    subnetwork has a unit whenever U p >= k and the graph is connected whenever U (p-1) >= k-1.

    Returns, raises: as `balanced`.
    """
    k, p = num_subnetworks, num_holders
    _check_counts(num_units, k, p)
    whole_rounds, left = divmod(num_units, k)
    starts = list(range(k)) * whole_rounds + [i * k // left for i in range(left)]
    return tuple(tuple(sorted((start + j) % k for j in range(p))) for start in starts)


def incidence(holders: Sequence[Sequence[int]], num_subnetworks: int) -> Table:
    """The table [U, k] of `holders`."""
    table = np.zeros((len(holders), num_subnetworks), dtype=np.int64)
    for unit, subnetworks in enumerate(holders):
        table[unit, list(subnetworks)] = 1
    return table


def to_holders(table: Table) -> Holders:
    """Inverse of `incidence`."""
    return tuple(tuple(int(subnetwork) for subnetwork in np.flatnonzero(row)) for row in table)


def is_connected(table: Table) -> bool:
    """Whether the bipartite graph of subnetworks and units is one piece; a table without subnetworks is."""
    return num_components(table) <= 1


def _check_counts(num_units: int, k: int, p: int) -> None:
    if not 1 <= p <= k:
        raise ValueError(f"holders must be 1 to {k} (the number of subnetworks), got {p}")
    if num_units * p < k:
        raise ValueError(
            f"{num_units} units with {p} holders each cannot give each of {k} subnetworks a unit; "
            f"use {-(-k // max(1, num_units))} or more holders, fewer subnetworks, a deeper model, or finer units"
        )


def _renamed(table: Table, costs: Sequence[UnitCost], seed: int) -> Table:
    """Permute subnetworks, and units among those of equal cost; seed 0 changes nothing."""
    if seed == 0:
        return table
    shuffler = random.Random(seed)
    columns = list(range(table.shape[1]))
    shuffler.shuffle(columns)
    rows = list(range(len(costs)))
    for cost in dict.fromkeys(costs):
        same = [unit for unit, other in enumerate(costs) if other == cost]
        shuffled = list(same)
        shuffler.shuffle(shuffled)
        for unit, source in zip(same, shuffled, strict=True):
            rows[unit] = source
    return table[rows][:, columns]
