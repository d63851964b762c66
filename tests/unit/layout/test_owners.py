"""Owners of whole tensors: holders, the same on all ranks, and even where holders allow it."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.layout.owners import excess, sole_owners
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.units import Piece, Unit
from tests.helpers.random_layouts import Layout, random_decoder, random_layout

layouts = st.builds(random_layout, st.integers(0, 100_000), st.integers(1, 6))


@given(layouts)
def test_each_whole_tensor_has_one_of_its_holders(layout: Layout) -> None:
    owners = sole_owners(layout.tensors, layout.plan)
    assert {piece.parameter for piece in owners} == {info.name for info in layout.tensors if info.is_whole}
    held = {piece: layout.plan.ranks_of(i) for i, unit in enumerate(layout.plan.units) for piece in unit.pieces}
    assert all(owner in held.get(piece, range(layout.size)) for piece, owner in owners.items())


def shared(num_ranks: int) -> Plan:
    """Everybody has all."""
    everyone = tuple(range(num_ranks))
    return Plan("forward", "block", num_ranks, num_ranks, 0, (Unit("u", ()),), (everyone,), everyone)


def loads(owners: dict[Piece, int], size: int) -> list[int]:
    return [sum(piece.length for piece, rank in owners.items() if rank == owner) for owner in range(size)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_shared_tensors_are_even_to_the_smallest_that_the_fullest_has(sizes: list[int], num_ranks: int) -> None:
    """Else it would have moved. So the fullest exceeds the emptiest by no tensor more, and is at most twice the mean or
    has one tensor only."""
    tensors = [TensorInfo(f"w{i}", (size,), torch.float32, 0, is_whole=True) for i, size in enumerate(sizes)]
    owners = sole_owners(tensors, shared(num_ranks))
    found = loads(owners, num_ranks)
    fullest = found.index(max(found))
    smallest = min(piece.length for piece, rank in owners.items() if rank == fullest)
    assert max(found) - min(found) <= smallest


def test_ranks_of_a_large_decoder_own_nearly_the_same() -> None:
    """32 layers on 8 ranks: each owns some 40 matrices, of which one is 1/32 of its share or less; within 2% of the
    mean, at every coverage, in any order of the layers' holders."""
    for num_holders in (8, 4, 2):
        for seed in range(3):
            tensors, plan = random_decoder(8, num_holders, 32, seed)
            found = loads(sole_owners(tensors, plan), 8)
            assert max(found) * 8 <= 1.02 * sum(found), (num_holders, seed, found)
            assert excess(sole_owners(tensors, plan), 8) == max(found) * 8 / sum(found)


def test_the_same_in_any_process() -> None:
    """Ties go to the lowest rank, and equal tensors in the order of the model: nothing depends on hashes."""
    tensors = [TensorInfo(f"w{i}", (size,), torch.float32, 0, is_whole=True) for i, size in enumerate((2, 3, 3, 2, 2))]
    owners = sole_owners(tensors, shared(2))
    assert {piece.parameter: rank for piece, rank in owners.items()} == {"w1": 0, "w2": 1, "w0": 0, "w3": 1, "w4": 0}
