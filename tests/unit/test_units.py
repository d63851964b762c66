"""Pieces and the check that a plan's pieces fit a model without overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp_deepspeed.units import Piece, Unit, check_pieces

SHAPES = {"w": (4, 6), "b": (4,), "s": ()}


def shape_of(piece: Piece) -> tuple[int, ...] | None:
    return SHAPES.get(piece.parameter) if piece.kind == "parameter" else None


def check(*pieces: Piece) -> None:
    check_pieces([Unit(f"u{index}", (piece,)) for index, piece in enumerate(pieces)], shape_of)


@pytest.mark.parametrize(("dim", "start", "length"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0), (1, 2, -3)])
def test_a_piece_is_never_empty_or_negative(dim: int, start: int, length: int) -> None:
    with pytest.raises(ValueError, match=rf"'w'.*dim={dim}, start={start}, length={length}"):
        Piece("w", dim, start, length)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([Piece("x", None, 0, 4)], "'u0'.*no parameter named 'x'"),
        ([Piece("b", None, 0, 4, "buffer")], "'u0'.*no buffer named 'b'"),
        ([Piece("w", 2, 0, 1)], r"\[0, 1\) of dim 2, but the tensor's shape is \(4, 6\)"),
        ([Piece("w", 0, 3, 2)], r"\[3, 5\) of dim 0"),
        ([Piece("w", 0, 0, 3), Piece("w", 0, 2, 1)], "'u0' and 'u1' overlap along dim 0"),
        ([Piece("w", 0, 2, 1), Piece("w", 0, 0, 3)], "'u1' and 'u0' overlap along dim 0"),
        ([Piece("w", 0, 0, 1), Piece("w", 1, 0, 1)], "claimed by 'u0' and 'u1'.*same dim"),
        ([Piece("w", None, 0, 24), Piece("w", 1, 0, 1)], "claimed by 'u0' and 'u1'"),
        ([Piece("b", None, 0, 4), Piece("b", None, 0, 4)], "claimed by 'u0' and 'u1'"),
    ],
)
def test_what_does_not_fit_is_named(pieces: list[Piece], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(*pieces)


def test_overlap_inside_one_unit_is_found() -> None:
    unit = Unit("u", (Piece("w", 0, 0, 2), Piece("w", 0, 1, 2)))
    with pytest.raises(ValueError, match="overlap"):
        check_pieces([unit], shape_of)


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=5))
def test_refused_exactly_when_an_element_is_claimed_twice(slices: list[tuple[int, int]]) -> None:
    claimed = [index for start, length in slices for index in range(start, start + length)]
    fits = len(claimed) == len(set(claimed)) and all(index < 12 for index in claimed)
    units = [Unit(f"u{i}", (Piece("w", 0, *cut),)) for i, cut in enumerate(slices)]
    if fits:
        check_pieces(units, lambda _: (12, 2))
    else:
        with pytest.raises(ValueError, match=r"overlap|takes"):
            check_pieces(units, lambda _: (12, 2))
