"""Fragments are copied out of a rank's tensors and into them, whatever the memory's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from sdp_deepspeed.layout.cuts import Cuts, Location, one_after_the_other
from sdp_deepspeed.layout.fragments import Fragment, PieceByPiece, Transfer, Views, locations, num_elements, read
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.units import Piece
from tests.helpers.random_layouts import views_of

CPU = torch.device("cpu")
COLUMNS = Piece("w", 1, 1, 2)


def values_of(views: Views, fragments: Sequence[Fragment]) -> list[torch.Tensor]:
    sizes = [fragment.num_elements for fragment in fragments]
    return read(views, Cuts(list(zip(locations(views, fragments), sizes, strict=True))), device=CPU)


def side_by_side(fragments: Sequence[Fragment]) -> Transfer:
    return Transfer(fragments, one_after_the_other(fragment.num_elements for fragment in fragments))


def kinds_of_views(tensors: Mapping[str, torch.Tensor]) -> list[Views]:
    """Each piece a tensor of its own, or all in the tensor in which they are stored."""
    return [views_of(tensors), PieceViews(tensors)]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("is_stored_by_column", [False, True])
def test_column_slices(kind: int, is_stored_by_column: bool) -> None:
    """Column by column, whatever the memory's order; what is written to stays as it is elsewhere."""
    tensor = torch.arange(12.0).view(3, 4)
    tensor = tensor.t().contiguous().t() if is_stored_by_column else tensor
    fragments = [Fragment(COLUMNS, 1, 4), Fragment(COLUMNS, 4, 6)]
    views = kinds_of_views({"w": tensor})[kind]
    assert [value.tolist() for value in values_of(views, fragments)] == [[5, 9, 2], [6, 10]]
    transfer, flat = side_by_side(fragments), torch.empty(5)
    for _ in range(2):
        transfer.gather(views, [flat])
        assert flat.tolist() == [5, 9, 2, 6, 10]
    transfer.scatter([torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])], views)
    assert tensor.tolist() == [[0, 1, -3, 3], [4, -1, -4, 7], [8, -2, -5, 11]]


@pytest.mark.parametrize("is_one_missing", [False, True])
def test_what_is_missing_counts_as_zeros(is_one_missing: bool) -> None:
    """Beside something that is there, and in another dtype, so that it cannot be in one list with it."""
    other = None if is_one_missing else torch.ones(3, dtype=torch.bfloat16)
    views = views_of({"w": torch.arange(12.0, dtype=torch.bfloat16).view(3, 4), "v": other})
    fragments = [Fragment(COLUMNS, 0, 2), Fragment(Piece("v", None, 0, 3), 1, 3), Fragment(COLUMNS, 2, 3)]
    expected = [[1, 5], [0, 0] if is_one_missing else [1, 1], [9]]
    assert [value.tolist() for value in values_of(views, fragments)] == expected
    flats = [torch.full((3,), -1.0), torch.full((2,), -1.0)]
    transfer = Transfer(fragments, [Location(0, 0), Location(1, 0), Location(0, 2)])
    transfer.gather(views, flats)
    assert [flat.tolist() for flat in flats] == [[1, 5, 9], expected[1]]
    nothing = PieceByPiece(lambda piece: None)
    assert [value.tolist() for value in values_of(nothing, fragments)] == [[0, 0], [0, 0], [0]]


def test_what_is_contiguous_in_order_is_not_copied() -> None:
    """Rows, whole tensors, and columns that are stored with the cut dim outermost."""
    rows, columns = torch.zeros(4, 3), torch.zeros(3, 4).t()
    for tensor, piece in ((rows, Piece("w", 0, 1, 2)), (rows, Piece("w", None, 0, 12)), (columns, COLUMNS)):
        for views in kinds_of_views({"w": tensor}):
            (value,) = values_of(views, [Fragment(piece, 1, 5)])
            assert value.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", [0, 1])
def test_a_half_written_piece_keeps_its_other_half(kind: int) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    fragments = [Fragment(Piece("w", 1, 0, 2), 1, 3)]
    side_by_side(fragments).scatter([torch.tensor([-1.0, -2.0])], kinds_of_views({"w": tensor})[kind])
    assert tensor.tolist() == [[0, -2, 2], [-1, 4, 5]]


def test_what_does_not_exist_cannot_be_written() -> None:
    fragments = [Fragment(Piece("w", None, 0, 2), 0, 2)]
    with pytest.raises(AssertionError, match="no tensor to write"):
        side_by_side(fragments).scatter([torch.zeros(2)], PieceByPiece(lambda piece: None))


def test_places_are_looked_up_once() -> None:
    """Tensors are asked for at each copy, each of them once."""
    asked: list[str] = []

    class Counted(PieceViews):
        def locate(self, piece: Piece) -> Location:
            asked.append("place")
            return super().locate(piece)

        def tensor(self, key: object) -> torch.Tensor:
            asked.append("tensor")
            return super().tensor(key)  # type: ignore[arg-type]

    views = Counted({"w": torch.zeros(4, 3)})
    fragments = [Fragment(Piece("w", 0, row, 1), 0, 3) for row in range(4)]
    transfer, flat = side_by_side(fragments), torch.ones(num_elements(fragments))
    for _ in range(3):
        transfer.gather(views, [flat])
        transfer.scatter([flat], views)
    assert asked == ["place"] * 4 + ["tensor"] * 6
