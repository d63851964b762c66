"""The repair that makes the graph of an assignment one piece."""

from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.plan.assignment.graph import connect, num_components
from sdp_deepspeed.plan.assignment.problem import branch_codes
from tests.helpers.assignment_tables import Branches, check_table, counts, widths
from tests.helpers.properties import examples


@examples(100)
@given(counts(), st.randoms(use_true_random=False))
def test_repair_connects_any_table(problem: tuple[int, int, int], order: random.Random) -> None:
    num_units, k, p = problem
    holders = [order.sample(range(k), p) for _ in range(num_units)]
    table = assignment.incidence(holders, k)
    assume(table.sum(axis=0).all())
    pieces = num_components(table)
    sizes = table.sum(axis=0).tolist()
    connect(table, np.ones((num_units, 2), dtype=np.int64))
    assert table.sum(axis=1).tolist() == [p] * num_units
    assert table.sum(axis=0).tolist() == sizes
    assert num_components(table) <= pieces
    if num_units * (p - 1) >= k - 1:
        assert num_components(table) == 1


def test_repair_moves_the_least() -> None:
    """Two halves; the first edge that could go would move 2, a later one swaps equal units and keeps the loads."""
    table = assignment.incidence([(0, 1), (0, 1), (2, 3), (2, 3)], 4)
    amounts = np.array([[5, 1], [1, 1], [3, 1], [5, 1]], dtype=np.int64)
    loads_before = (table.T @ amounts).tolist()
    connect(table, amounts)
    assert num_components(table) == 1
    assert (table.T @ amounts).tolist() == loads_before


def test_repair_looks_at_edges_of_the_first_units_too() -> None:
    """Blocks of a ResNet: equal FLOPs, four times the bytes in each stage. The last units of each half go round a
    cycle with the first ones: 4 for 1 moves less than 16 for 1."""
    table = assignment.incidence([(0, 1), (2, 3), (2, 3), (0, 1)], 4)
    amounts = np.array([[9, 1], [9, 4], [9, 16], [9, 64]], dtype=np.int64)
    connect(table, amounts)
    assert num_components(table) == 1
    assert (table.T @ amounts).max(axis=0).tolist() == [18, 68]


@st.composite
def in_pieces(draw: st.DrawFn) -> tuple[list[list[int]], Branches, int]:
    """(holders, branches, p): a table whose subnetworks fall into groups, all with each branch."""
    p = draw(st.integers(2, 4))
    edges = [0]
    for _ in range(draw(st.integers(2, 3))):
        edges.append(edges[-1] + draw(st.integers(p, p + 2)))
    pieces = [range(*pair) for pair in itertools.pairwise(edges)]
    order = draw(st.randoms(use_true_random=False))
    holders: list[list[int]] = []
    branches: Branches = []
    parts: list[Branches] = [["a"], ["a", "b"], ["a", None], ["a", "b", None]]
    for name in draw(st.sampled_from(parts)):
        for piece in pieces if name is not None else []:
            holders += [[min(first, piece[-1] + 1 - p) + j for j in range(p)] for first in piece[::p]]
        holders += [order.sample(order.choice(pieces), p) for _ in range(draw(st.integers(0, 6)))]
        branches += [name] * (len(holders) - len(branches))
    return holders, branches, p


@examples(100)
@given(in_pieces())
def test_repair_keeps_widths(problem: tuple[list[list[int]], Branches, int]) -> None:
    holders, branches, p = problem
    k = 1 + max(max(subnetworks) for subnetworks in holders)
    table = assignment.incidence(holders, k)
    before, pieces = widths(assignment.to_holders(table), branches, k), num_components(table)
    connect(table, np.ones((len(table), 2), dtype=np.int64), branch_codes(branches, len(table)))
    check_table(assignment.to_holders(table), len(table), k, p)
    assert widths(assignment.to_holders(table), branches, k) == before
    assert num_components(table) < pieces or len(table) * p <= len(table) + k - pieces


def test_repair_gives_a_block_away() -> None:
    """The only cycle is made of two blocks, and the other half has none: one end of a block moves there."""
    table = assignment.incidence([(0, 1), (2, 3), (4, 5), (0, 2), (0, 2)], 6)
    connect(table, np.ones((5, 2), dtype=np.int64), np.array([1, 1, 1, 0, 0]))
    assert num_components(table) == 1
    assert table[:3].sum(axis=0).tolist() == [1] * 6
    assert table.sum(axis=1).tolist() == [2] * 5
