"""The bipartite graph of subnetworks and units: is it one piece, and how to make it one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_MAX_SPARE = 16  # edges on a cycle that one repair considers


@dataclass(frozen=True)
class Forest:
    """Spanning forest of a table [U, k].

    Args:
        root: component of each node, subnetworks first, then units; [k + U].
        spare: (unit, subnetwork) edges outside the forest: each lies on a cycle, so removing one disconnects nothing.
    """

    root: Sequence[int]
    spare: Sequence[tuple[int, int]]


def spanning_forest(table: Ints) -> Forest:
    """Components of the graph of `table` and the edges that it could spare."""
    num_units, k = table.shape
    parent = list(range(k + num_units))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    spare = []
    for unit, subnetwork in np.argwhere(table).tolist():
        a, b = find(k + unit), find(subnetwork)
        if a == b:
            spare.append((unit, subnetwork))
        else:
            parent[max(a, b)] = min(a, b)
    return Forest([find(node) for node in range(k + num_units)], spare)


def num_components(table: Ints) -> int:
    """Number of pieces of the graph, subnetworks without units included."""
    return len(set(spanning_forest(table).root))


def connect(table: Ints, amounts: Ints) -> None:
    """Swap units between components, in place, until the graph is one piece or has no spare edge left.

    A spare edge (u, a) of one component and any edge (v, b) of another become (v, a) and (u, b): whatever
    falls apart on the other side hangs on `a` or on `u` now, so each swap leaves one component less. There is
    a spare edge as long as U p > U + k - (number of components), hence connected whenever U (p-1) >= k-1.

    Args:
        table: 0/1, [U, k]; every subnetwork has a unit.
        amounts: FLOPs and bytes of each unit, [U, 2]; of several swaps the one that moves the least is taken.
    """
    num_units, k = table.shape
    while True:
        forest = spanning_forest(table)
        if len(set(forest.root)) == 1 or not forest.spare:
            return
        best: tuple[list[int], int, int, int] | None = None
        for u, a in forest.spare[:_MAX_SPARE]:
            elsewhere = [unit for unit in range(num_units) if forest.root[k + unit] != forest.root[a]]
            moved = abs(amounts[elsewhere] - amounts[u])
            v = int(np.lexsort((moved[:, 1], moved[:, 0]))[0])
            if best is None or moved[v].tolist() < best[0]:
                best = (moved[v].tolist(), u, a, elsewhere[v])
        assert best is not None
        _, u, a, v = best
        b = int(np.flatnonzero(table[v])[0])
        table[u, [a, b]] = 0, 1
        table[v, [b, a]] = 0, 1
