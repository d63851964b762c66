"""The bipartite graph of subnetworks and units: is it one piece, and how to make it one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Holders = tuple[tuple[int, ...], ...]

_MAX_SPARE = 16  # edges on a cycle that one repair considers


def incidence(holders: Sequence[Sequence[int]], num_subnetworks: int) -> Ints:
    """The table [U, k] of `holders`."""
    table = np.zeros((len(holders), num_subnetworks), dtype=np.int64)
    for unit, subnetworks in enumerate(holders):
        table[unit, list(subnetworks)] = 1
    return table


def to_holders(table: Ints) -> Holders:
    """Inverse of `incidence`."""
    subnetworks, ends = np.nonzero(table)[1].tolist(), np.cumsum(table.sum(axis=1)).tolist()
    return tuple(tuple(subnetworks[start:end]) for start, end in pairwise([0, *ends]))


def is_connected(table: Ints) -> bool:
    """Whether the bipartite graph of subnetworks and units is one piece; a table without subnetworks is.

    Every unit has a subnetwork, so it is enough to look at these: from one on, all that share a unit with one reached.
    """
    held = table.astype(np.float32)  # sums of zeros and ones stay above zero
    shared = held.T @ held > 0
    reached = np.arange(table.shape[1]) == 0
    while True:
        wider = reached | shared[reached].any(axis=0)
        if (wider == reached).all():
            return bool(reached.all())
        reached = wider


@dataclass(frozen=True)
class Forest:
    """Spanning forest of a table [U, k].

    Args:
        root: component of each node, subnetworks first, then units; [k + U].
        spare: (unit, subnetwork) edges outside the forest: each lies on a cycle, so removing one disconnects nothing.
    """

    root: Sequence[int]
    spare: Sequence[tuple[int, int]]


def spanning_forest(table: Ints, *, backwards: bool = False) -> Forest:
    """Components of the graph of `table` and edges that it could spare: of the last units, or `backwards` of the first
    ones."""
    num_units, k = table.shape
    parent = list(range(k + num_units))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    spare = []
    edges = np.argwhere(table).tolist()
    for unit, subnetwork in reversed(edges) if backwards else edges:
        a, b = find(k + unit), find(subnetwork)
        if a == b:
            spare.append((unit, subnetwork))
        else:
            parent[max(a, b)] = min(a, b)
    return Forest([find(node) for node in range(k + num_units)], spare)


def num_components(table: Ints) -> int:
    """Number of pieces of the graph, subnetworks without units included."""
    return len(set(spanning_forest(table).root))


def connect(table: Ints, amounts: Ints, codes: Ints | None = None) -> None:
    """Swap units between components, in place, until the graph is one piece or has no spare edge left.

    A spare edge (u, a) of one component and any edge (v, b) of another become (v, a) and (u, b): whatever
    falls apart on the other side hangs on `a` or on `u` now, so each swap leaves one component less. There is
    a spare edge as long as U p > U + k - (number of components), hence connected whenever U (p-1) >= k-1.

    Units trade places within their branch only, so that each subnetwork keeps as many of it; every component has
    units of every branch, because every subnetwork has. Block units may be in one component only: then `u` goes to
    another one, (u, a) becomes (u, b), and nothing comes back; `a` is on a cycle, so it keeps another unit.

    Args:
        table: 0/1, [U, k]; every subnetwork has a unit, and one of each branch.
        amounts: FLOPs and bytes of each unit, [U, 2]; of several swaps the one that moves the least is taken.
        codes: branch of each unit, [U], 0 for block units; None if all are.
    """
    codes = np.zeros(len(table), dtype=np.int64) if codes is None else codes
    while True:
        forest = spanning_forest(table)
        if len(set(forest.root)) == 1 or not forest.spare:
            return
        other = replace(forest, spare=spanning_forest(table, backwards=True).spare)
        repairs = chain(_repairs(table, forest, amounts, codes), _repairs(table, other, amounts, codes))
        _, u, a, v = min(repairs, key=lambda repair: repair[0])
        if v is None:
            b = _lightest_elsewhere(table, forest, amounts, a)
        else:
            b = int(np.flatnonzero(table[v])[0])
            table[v, [b, a]] = 0, 1
        table[u, [a, b]] = 0, 1


def _repairs(
    table: Ints, forest: Forest, amounts: Ints, codes: Ints
) -> Iterator[tuple[list[int], int, int, int | None]]:
    """For each spare edge (u, a) what a repair would move, u, a, and the unit v that would come back, if any."""
    num_units, k = table.shape
    for u, a in forest.spare[:_MAX_SPARE]:
        elsewhere = [v for v in range(num_units) if forest.root[k + v] != forest.root[a] and codes[v] == codes[u]]
        if elsewhere:
            moved = abs(amounts[elsewhere] - amounts[u])
            v = int(np.lexsort((moved[:, 1], moved[:, 0]))[0])
            yield moved[v].tolist(), u, a, elsewhere[v]
        else:
            yield amounts[u].tolist(), u, a, None


def _lightest_elsewhere(table: Ints, forest: Forest, amounts: Ints, a: int) -> int:
    """The subnetwork with the least FLOPs, then bytes, outside the component of `a`."""
    loads = table.T @ amounts
    elsewhere = [b for b in range(table.shape[1]) if forest.root[b] != forest.root[a]]
    return min(elsewhere, key=lambda b: loads[b].tolist())
