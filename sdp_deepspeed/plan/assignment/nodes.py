"""Holders on few nodes: a table that sends less between nodes than a balanced one, for some of its spectral gap.

A unit whose holders are on m nodes is sent between nodes m - 1 times, however many holders each node has. With M nodes
that have equally many of them and meet equally often, the gap is at most M (m-1) / (m (M-1)), whatever else the table
does. So both depend on m, and where a node has holders at all it may as well have many.

Words: a ring is an order of the k subnetworks in which `chunk` neighbors are on one node, and the next ones on another.
A round of it is e = k / gcd(k, p) sets: windows of p neighbors, one after the other, p / gcd(k, p) times around. So it
holds every subnetwork equally often, whatever the sizes of the nodes, and a window is on about p / chunk of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from sdp_deepspeed.plan.assignment.deal import deal, equal_units
from sdp_deepspeed.plan.assignment.graph import Holders, incidence, to_holders
from sdp_deepspeed.plan.assignment.methods import renamed
from sdp_deepspeed.plan.assignment.problem import Branches, Ints, Problem
from sdp_deepspeed.plan.assignment.rounds import Exact, round_size
from sdp_deepspeed.plan.spectral_gap import gap_of_overlaps
from sdp_deepspeed.units import UnitCost

LEAST_GAP = 3, 4  # of the balanced table's
_SLACK = 1e-6  # far above rounding errors, so that all platforms decide alike; the check of the hash would tell
_PARTS = 12  # so many of which are dealt from rings, or fewer
_MAX_TRIES = 5  # with a part less each time
_HOPED_FOR = 2  # parts more than if the others were dealt without a look at these
_MAX_ROUNDS = 32  # of rings; above this time grows and the gap does not
_MAX_DRAWN = 16  # rings that are compared for each round


def on_few_nodes(
    costs: Sequence[UnitCost],
    balanced: Holders,
    nodes: Sequence[int],
    *,
    seed: int = 0,
    branches: Branches | None = None,
) -> Holders | None:
    """Fewest nodes for each unit with three quarters of a balanced table's spectral gap, and balanced like it.

    Args:
        costs: cost of each of the U units; trainable elements are what travels.
        balanced: for each unit its subnetworks, by `methods.balanced`.
        nodes: for each of the k subnetworks the number of its node.
        seed, branches: as for `methods.balanced`; subnetworks of one node change names.

    Returns:
        For each unit its subnetworks, at most 5k different sets; None if no such table has fewer nodes, or units that
        not all subnetworks hold have different numbers of holders.
    """
    k = len(nodes)
    cut = [unit for unit, holders in enumerate(balanced) if len(holders) < k]  # the others have holders on all nodes
    if len({len(balanced[unit]) for unit in cut}) != 1:
        return None
    of_cut = None if branches is None else [branches[unit] for unit in cut]
    found = _on_few_nodes([costs[unit] for unit in cut], tuple(balanced[unit] for unit in cut), nodes, seed, of_cut)
    if found is None:
        return None
    placed = dict(zip(cut, found, strict=True))
    return tuple(placed.get(unit, holders) for unit, holders in enumerate(balanced))


def _on_few_nodes(
    costs: Sequence[UnitCost], balanced: Holders, nodes: Sequence[int], seed: int, branches: Branches | None
) -> Holders | None:
    """For units of one p."""
    k, p, weights = len(nodes), len(balanced[0]), np.array([cost.num_parameters for cost in costs], dtype=np.int64)
    if not 1 < p < k - 1 or weights.sum() == 0:
        return None
    problem, table = Problem.of(costs, k, (p,) * len(costs), branches), incidence(balanced, k)
    on_node = np.array([[node == other for other in sorted(set(nodes))] for node in nodes], dtype=np.int64)
    before = _Measures.of(table, weights, on_node)
    if before.gap <= _SLACK:  # then there is nothing to weigh
        return None
    least = before.gap * LEAST_GAP[0] / LEAST_GAP[1] - _SLACK
    for rounds, parts in _mixtures(nodes, p, on_node, before, least):
        found = _dealt(problem, weights, rounds, parts)
        if found is None or not _is_as_balanced(problem, found, table):
            continue
        after = _Measures.of(found, weights, on_node)
        if after.visits < before.visits - _SLACK and after.gap >= least:
            groups = [np.flatnonzero(node).tolist() for node in on_node.T]
            return to_holders(renamed(found, costs, problem.codes, seed, groups))
    return None


@dataclass(frozen=True)
class _Measures:
    """What tables are compared by: means over units by weight.

    Args:
        overlaps: which pairs of subnetworks share, [k, k].
        visits: nodes that holders are on, less one.
    """

    overlaps: Exact
    visits: float

    @classmethod
    def of(cls, table: Ints, weights: Ints, on_node: Ints) -> _Measures:
        """Of a table [U, k] with weights [U], and 1 for the node of each subnetwork, [k, nodes]."""
        held, share = table.astype(np.float64), weights / weights.sum()
        return cls((held.T * share) @ held, float((((held @ on_node) > 0).sum(axis=1) - 1) @ share))

    def mixed(self, other: _Measures, share: float) -> _Measures:
        """With `share` of the units like this, and the rest like `other`."""
        return _Measures(
            share * self.overlaps + (1 - share) * other.overlaps, share * self.visits + (1 - share) * other.visits
        )

    @property
    def gap(self) -> float:
        return gap_of_overlaps(self.overlaps)


def _mixtures(
    nodes: Sequence[int], p: int, on_node: Ints, before: _Measures, least: float
) -> Iterator[tuple[Ints, int]]:
    """Rounds, and about how many parts of the units may be dealt from them; those of the fewest nodes come first."""
    found = []
    chunk = int(on_node.sum(axis=0).max())
    while chunk > 1:
        rounds = find_rings(nodes, p, chunk)
        sets = rounds.reshape(-1, len(nodes))
        rings = _Measures.of(sets, np.ones(len(sets), dtype=np.int64), on_node)
        mixed = ((parts, rings.mixed(before, parts / _PARTS)) for parts in range(_PARTS, 0, -1))
        parts, best = next(((parts, one) for parts, one in mixed if one.gap >= least), (0, before))
        if best.visits < before.visits - _SLACK:
            found.append((round(best.visits / _SLACK), -chunk, parts, rounds))
        chunk = -(-chunk // 2)
    for _, _, parts, rounds in sorted(found, key=lambda one: one[:2]):
        most = min(_PARTS, parts + _HOPED_FOR)
        yield from ((rounds, fewer) for fewer in range(most, max(0, most - _MAX_TRIES), -1))


def find_rings(nodes: Sequence[int], p: int, chunk: int) -> Ints:
    """Rounds [n, e, k] of at most k sets, with which pairs of subnetworks share as evenly as of a few that are drawn.

    Args:
        nodes: for each of the k subnetworks the number of its node.
        p: holders of a unit.
        chunk: neighbors on one node, as far as it has so many.
    """
    k, order = len(nodes), random.Random(0)
    members = [[subnetwork for subnetwork, at in enumerate(nodes) if at == node] for node in sorted(set(nodes))]
    shared: Exact = np.zeros((k, k), dtype=np.float64)
    rounds = []
    for _ in range(min(gcd(k, p), _MAX_ROUNDS)):
        drawn = np.array([_windows(_ring(members, chunk, order), p) for _ in range(_MAX_DRAWN)])
        held = drawn.astype(np.float64)  # counts exactly
        common = held @ held.transpose(0, 2, 1)
        added = 2 * (held @ shared * held).sum(axis=(1, 2)) + (common * common).sum(axis=(1, 2))
        best = int(added.argmin())
        shared += held[best].T @ held[best]
        rounds.append(drawn[best])
    return np.array(rounds)


def _ring(members: list[list[int]], chunk: int, order: random.Random) -> list[int]:
    """Nodes in any order, and of each in turn `chunk` of its subnetworks, in any order."""
    most = max(map(len, members))
    drawn = order.sample(members, len(members))
    if chunk < most:
        drawn = [order.sample(node, len(node)) for node in drawn]
    return [
        subnetwork for start in range(0, most, chunk) for node in drawn for subnetwork in node[start : start + chunk]
    ]


def _windows(ring: list[int], p: int) -> Ints:
    """The sets of a round, [e, k]."""
    k = len(ring)
    sets = np.zeros((round_size(k, p), k), dtype=np.int64)
    positions = np.arange(sets.shape[0] * p).reshape(-1, p) % k
    np.put_along_axis(sets, np.array(ring)[positions], 1, axis=1)
    return sets


def _dealt(problem: Problem, weights: Ints, rounds: Ints, parts: int) -> Ints | None:
    """A table [U, k] with up to `parts` of the units by weight from whole rounds, each a round of units of one branch
    or of equal blocks, and the others spread; None if there is no such round."""
    hands, rest = _whole_rounds(problem, rounds.shape[1])
    table = np.zeros((len(weights), problem.num_subnetworks), dtype=np.int64)
    from_rings = seen = number = 0
    for hand in hands:
        weight = int(weights[hand].sum())
        seen += weight
        if _PARTS * (from_rings + weight) > parts * seen:
            rest.append(hand)
        else:
            table[hand] = rounds[number % len(rounds)]
            from_rings, number = from_rings + weight, number + 1
    if number == 0:
        return None
    if rest:
        left = np.sort(np.concatenate(rest))
        dealt = table.any(axis=1)
        table[left] = deal(problem.part(left), (table[dealt], problem.weights[dealt]))
    return table


def _whole_rounds(problem: Problem, e: int) -> tuple[list[Ints], list[Ints]]:
    """Hands of e units that may have a round, and what is left: of each branch none, or enough for all subnetworks."""
    hands, rest = [], []
    for units in equal_units(problem):
        left = len(units) % e
        stop = max(0, len(units) - (left + e if left else 0))
        hands += np.split(units[:stop], range(e, stop, e)) if stop else []
        rest += [units[stop:]] if stop < len(units) else []
    return hands, rest


def _is_as_balanced(problem: Problem, table: Ints, balanced: Ints) -> bool:
    """Whether FLOPs, bytes and widths are as good as of `balanced`, or FLOPs and bytes within the limits."""
    limits = np.maximum(problem.limits(), problem.loads(balanced).max(axis=0))
    is_even = problem.raggedness(table) <= problem.raggedness(balanced)
    return is_even and bool((problem.loads(table).max(axis=0) <= limits).all())
