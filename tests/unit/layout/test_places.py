"""Where pieces lie in a rank's tensors: side by side in dense order, held and lacking ones apart."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.layout.fragments import Fragment
from sdp_deepspeed.layout.places import PieceViews, in_order, memory_format_of, side_by_side
from sdp_deepspeed.units import Piece
from tests.helpers.random_layouts import SIZES, indices

ROWS, COLUMNS, WHOLE = Piece("w", 0, 1, 2), Piece("w", 1, 1, 2), Piece("w", None, 0, 12)


def dense() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (WHOLE, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]),
        (ROWS, [[3, 4, 5], [6, 7, 8]]),
        (COLUMNS, [[1, 4, 7, 10], [2, 5, 8, 11]]),
    ],
)
def test_in_order_is_the_cut_dim_first(piece: Piece, expected: list[list[float]]) -> None:
    tensor = dense()
    view = in_order(piece, piece.narrow(tensor))
    assert view.tolist() == expected
    view.zero_()
    assert not piece.narrow(tensor).any(), "a view, not a copy"


def test_in_order_of_three_dims() -> None:
    tensor, piece = torch.arange(24.0).view(2, 3, 4), Piece("w", 2, 1, 2)
    assert in_order(piece, piece.narrow(tensor)).shape == (2, 2, 3)
    assert in_order(piece, piece.narrow(tensor)).reshape(-1).tolist() == [1, 5, 9, 13, 17, 21, 2, 6, 10, 14, 18, 22]


@pytest.mark.parametrize("dim", [0, 1])
def test_side_by_side_copies_with_the_cut_dim_outermost(dim: int) -> None:
    tensor, pieces = dense(), [Piece("w", dim, 0, 1), Piece("w", dim, 2, 1)]
    stored = side_by_side(pieces, tensor)
    assert torch.equal(stored, tensor[[0, 2]] if dim == 0 else tensor[:, [0, 2]])
    assert stored.movedim(dim, 0).is_contiguous()
    assert stored.untyped_storage().nbytes() == 4 * stored.numel()
    stored.fill_(-1)
    assert torch.equal(tensor, dense())


def test_side_by_side_takes_no_whole_tensors() -> None:
    with pytest.raises(AssertionError, match="whole tensors stay"):
        side_by_side([WHOLE], dense())


def test_a_tensor_that_nobody_cut_lies_as_in_the_dense_model() -> None:
    tensor = dense()
    views = PieceViews({"w": torch.nn.Parameter(tensor)})
    for piece in (ROWS, COLUMNS, WHOLE):
        assert torch.equal(views.weight_view(piece), piece.narrow(tensor))
        assert not views.weight_view(piece).requires_grad
        assert torch.equal(views.view_in(piece, 2 * tensor), 2 * piece.narrow(tensor))
    views.weight_view(COLUMNS).zero_()
    assert tensor.tolist() == [[0, 0, 0], [3, 0, 0], [6, 0, 0], [9, 0, 0]]
    assert views.lacking == {}


def test_held_and_lacking_pieces_lie_apart() -> None:
    """Columns 0 and 2 are held, 1 is not: it lies in a tensor of its own, from its first column on."""
    held, lacking, whole = [Piece("w", 1, 0, 1), Piece("w", 1, 2, 1)], [Piece("w", 1, 1, 1)], dense()
    parameter = torch.nn.Parameter(side_by_side(held, whole))
    other = side_by_side(lacking, whole)
    views = PieceViews({"w": parameter})
    views.put(held)
    views.put(lacking, other)
    assert [views.weight_view(piece).flatten().tolist() for piece in (*held, *lacking)] == [
        [0, 3, 6, 9],
        [2, 5, 8, 11],
        [1, 4, 7, 10],
    ]
    assert views.lacking["w"] is other
    gradient = torch.arange(8.0).view(4, 2)
    assert views.view_in(held[1], gradient).flatten().tolist() == [1, 3, 5, 7]
    views.weight_view(lacking[0]).fill_(-1)
    views.weight_view(held[1]).fill_(-2)
    assert bool((other == -1).all())
    assert parameter.tolist() == [[0, -2], [3, -2], [6, -2], [9, -2]]


def test_replaced_storage_is_followed() -> None:
    """Others put new storage behind a parameter; views are of what is there when they are asked for."""
    parameter = torch.nn.Parameter(side_by_side([COLUMNS], dense()))
    views = PieceViews({"w": parameter})
    views.put([COLUMNS])
    parameter.data = torch.zeros(4, 2)
    views.weight_view(COLUMNS).fill_(3)
    assert bool((parameter == 3).all())


@dataclass(frozen=True)
class Cut:
    """A dense tensor, its pieces in dense order, and whether a rank holds each."""

    tensor: torch.Tensor
    pieces: tuple[Piece, ...]
    held: tuple[bool, ...]

    def parts(self, held: bool) -> list[Piece]:
        return [piece for piece, mine in zip(self.pieces, self.held, strict=True) if mine == held]


def random_cut(seed: int) -> Cut:
    chance = random.Random(seed)
    shape = [chance.choice(SIZES) for _ in range(chance.choice((1, 2, 3)))]
    dim = chance.randrange(len(shape))
    shape[dim] = length = chance.randint(2, 12)
    edges = [0, *sorted(chance.sample(range(1, length), chance.randint(1, length - 1))), length]
    pieces = tuple(Piece("w", dim, start, stop - start) for start, stop in itertools.pairwise(edges))
    held = [chance.random() < 0.5 for _ in pieces]
    held[chance.randrange(len(held))] = True  # a rank keeps at least one
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Cut(tensor, pieces, tuple(held))


cuts = st.builds(random_cut, st.integers(0, 100_000))


def stored(cut: Cut, *, keeps_lacking: bool) -> PieceViews:
    """As a masked module stores it."""
    views = PieceViews({"w": torch.nn.Parameter(side_by_side(cut.parts(held=True), cut.tensor))})
    views.put(cut.parts(held=True))
    if keeps_lacking and cut.parts(held=False):
        views.put(cut.parts(held=False), side_by_side(cut.parts(held=False), cut.tensor))
    return views


@given(cuts)
def test_round_trip(cut: Cut) -> None:
    """What is stored apart is the dense tensor again, and each held piece can be stepped in place."""
    views = stored(cut, keeps_lacking=True)
    again = torch.full_like(cut.tensor, torch.nan)
    for piece in cut.pieces:
        assert views.weight_view(piece).shape == piece.narrow(cut.tensor).shape
        assert in_order(piece, views.weight_view(piece)).is_contiguous()
        flat = cut.tensor.flatten()[indices(Fragment(piece, 0, piece.narrow(cut.tensor).numel()), cut.tensor.shape)]
        assert torch.equal(in_order(piece, views.weight_view(piece)).flatten(), flat)
        piece.narrow(again).copy_(views.weight_view(piece))
    assert torch.equal(again, cut.tensor)


@given(cuts)
def test_pieces_and_what_is_laid_out_like_the_parameter(cut: Cut) -> None:
    """Each element of the parameter's gradient belongs to one held piece; writing one piece changes no other."""
    views = stored(cut, keeps_lacking=False)
    assert views.lacking == {}
    gradient = torch.zeros_like(views.tensors["w"])
    for number, piece in enumerate(cut.parts(held=True), start=1):
        views.view_in(piece, gradient).add_(number)
    for number, piece in enumerate(cut.parts(held=True), start=1):
        assert bool((views.view_in(piece, gradient) == number).all())
    assert bool(gradient.all())


@pytest.mark.parametrize("shape", [(4, 6, 3, 3), (4, 6, 1, 1), (4, 6, 2, 3, 3)])
def test_channels_last_is_kept(shape: tuple[int, ...]) -> None:
    memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    row_major = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tensor = row_major.clone(memory_format=memory_format)
    assert memory_format_of(row_major) == memory_format_of(dense()) == torch.contiguous_format
    assert memory_format_of(tensor) == PieceViews({"w": tensor}).formats["w"] == memory_format
    for dim in (0, 1):
        pieces = [Piece("w", dim, 0, 1), Piece("w", dim, 2, 2)]
        stored = side_by_side(pieces, tensor, memory_format)
        assert torch.equal(stored, side_by_side(pieces, row_major))
        assert memory_format_of(stored) == memory_format
