"""Views of many stretches, and copies between flat tensors, against slices one by one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from weakref import ref

import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.layout.cuts import Cuts, Location, Moves, one_after_the_other
from tests.helpers.torch_calls import Calls

LENGTHS = {"a": 40, "b": 7, "c": 1}
stretches = st.lists(
    st.sampled_from(sorted(LENGTHS)).flatmap(
        lambda tensor: st.tuples(st.just(tensor), st.integers(0, LENGTHS[tensor] - 1), st.integers(1, LENGTHS[tensor]))
    )
)


def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(sum(LENGTHS.values())).split(list(LENGTHS.values()))
    return dict(zip(LENGTHS, numbers, strict=True))


@given(stretches)
def test_views_are_the_slices(asked: Sequence[tuple[str, int, int]]) -> None:
    """In any order, with gaps, twice the same, one over the other."""
    flats = tensors()
    ranges = [(tensor, start, min(start + size, LENGTHS[tensor])) for tensor, start, size in asked]
    cuts = Cuts([(Location(tensor, start), stop - start) for tensor, start, stop in ranges])
    for view, (tensor, start, stop) in zip(cuts.of(flats), ranges, strict=True):
        assert torch.equal(view, flats[tensor][start:stop])
        assert view.untyped_storage().data_ptr() == flats[tensor].untyped_storage().data_ptr()
    assert cuts.sizes == [stop - start for _, start, stop in ranges]
    assert cuts.of(dict.fromkeys(LENGTHS)) == [None] * len(ranges)


def test_one_call_for_all_that_do_not_overlap() -> None:
    flat = torch.arange(100)
    apart = [(Location(0, start), 3) for start in range(0, 100, 5)]
    for asked, expected in (
        (apart, 1),
        (apart[::-1], 1),
        (apart + apart, 1),
        ([*apart, (Location(0, 2), 2)], 2),
        ([(Location(0, 0), 100)], 0),
    ):
        cuts = Cuts(asked)
        with Calls() as calls:
            views = cuts.of([flat])
        assert calls.names.count("split_with_sizes") == expected
        assert [view.tolist() for view in views] == [list(range(at.start, at.start + n)) for at, n in asked]


def random_moves(seed: int) -> list[tuple[Location, Location, int]]:
    """Of all elements of some tensors to other places, in pieces that are sometimes neighbors there too."""
    chance = random.Random(seed)
    pieces = [
        (Location(tensor, start), size) for tensor, length in LENGTHS.items() for start, size in _cut(length, chance)
    ]
    if chance.random() < 0.7:
        chance.shuffle(pieces)
    starts = one_after_the_other(size for _, size in pieces)
    return [(here, there, size) for (here, size), there in zip(pieces, starts, strict=True)]


def _cut(length: int, chance: random.Random) -> list[tuple[int, int]]:
    edges = sorted({0, length, *(chance.randrange(length + 1) for _ in range(4))})
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]


@given(st.builds(random_moves, st.integers(0, 100_000)))
def test_there_and_back(moves: list[tuple[Location, Location, int]]) -> None:
    flats, flat = tensors(), torch.full((sum(LENGTHS.values()),), -1)
    Moves(moves).copy(flats, [flat])
    for here, there, size in moves:
        assert torch.equal(flat[there.start : there.start + size], flats[here.tensor][here.start : here.start + size])
    again = {name: torch.full_like(tensor, -1) for name, tensor in flats.items()}
    Moves(moves).copy_back([flat], again)
    assert all(torch.equal(again[name], tensor) for name, tensor in flats.items())


def test_neighbors_that_stay_neighbors_move_as_one() -> None:
    a, b = [Location("a", start) for start in (0, 4, 8)], [Location("b", start) for start in (10, 14, 20)]
    moves = Moves((here, there, 4) for here, there in zip(a, b, strict=True))
    assert (moves.here.sizes, moves.there.sizes) == ([8, 4], [8, 4])
    assert Moves((here, there, 3) for here, there in zip(a, b, strict=True)).here.sizes == [3, 3, 3]
    assert Moves([(a[0], b[0], 4), (Location("c", 4), b[1], 4)]).here.sizes == [4, 4]


def test_what_is_not_here_counts_as_zeros() -> None:
    moves = Moves([(Location("a", 1), Location(0, 0), 2), (Location("b", 0), Location(0, 2), 2)])
    flat = torch.full((5,), -1.0)
    moves.copy({"a": torch.tensor([1, 2, 3]), "b": None}, [flat])
    assert flat.tolist() == [2, 3, 0, 0, -1]
    moves.copy({"a": None, "b": None}, [flat])
    assert flat.tolist() == [0, 0, 0, 0, -1]
    Moves([]).copy({}, [flat])
    Moves([]).copy_back([flat], {})


def test_views_of_what_is_used_again_are_kept() -> None:
    """From the second time on, and only as long as it is the same tensor; what is used once stays nobody's."""
    cuts, buffer = Cuts([(Location(0, 0), 2), (Location(0, 3), 4)]), torch.arange(8)
    first, second, third = (cuts.of([buffer]) for _ in range(3))
    assert first[0] is not second[0]
    assert second[0] is third[0]
    other = buffer + 1
    others = cuts.of([other])
    assert [view.tolist() for view in others] == [[1, 2], [4, 5, 6, 7]]
    lives = [ref(other), ref(others[0])]
    del other, others
    assert [life() for life in lives] == [None, None], "what was used once is still there"
    assert cuts.of({0: None}) == [None, None]
    another = buffer + 2
    for _ in range(3):
        assert [view.tolist() for view in cuts.of([another])] == [[2, 3], [5, 6, 7, 8]]
