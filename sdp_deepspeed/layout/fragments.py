"""Stretches of pieces: read from this rank's tensors into flat ones, and written back."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sdp_deepspeed.layout.cuts import Cuts, Flats, Location, Moves
from sdp_deepspeed.layout.places import in_order
from sdp_deepspeed.units import Piece


class Views(Protocol):
    """This rank's tensors, as the pieces lie in them. Tensors come and go; where a piece lies stays the same."""

    def locate(self, piece: Piece) -> Location:
        """In which tensor a piece lies, and where it begins there."""

    def tensor(self, key: Any) -> torch.Tensor | None:
        """The tensor of a location, in the order of `places.in_order`; None where there is none."""


class PieceByPiece:
    """Views where each piece is a tensor of its own.

    Args:
        view: from a piece to its tensor, shaped as in the dense model; None where there is none.
    """

    def __init__(self, view: Callable[[Piece], torch.Tensor | None]) -> None:
        self._view = view

    def locate(self, piece: Piece) -> Location:
        return Location(piece, 0)

    def tensor(self, key: Piece) -> torch.Tensor | None:
        view = self._view(key)
        return None if view is None else in_order(key, view)


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of one piece, in the order of `places.in_order`: its cut dim first, then row-major."""

    piece: Piece
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


def num_elements(fragments: Iterable[Fragment]) -> int:
    """Of all of them together."""
    return sum(fragment.num_elements for fragment in fragments)


class Transfer:
    """Fragments of this rank's tensors, and where they belong in some flat tensors; worked out at the first copy, and
    forgotten then: there are many.

    Args:
        fragments: no two of them overlap.
        locations: of each in the flat tensors.
    """

    def __init__(self, fragments: Sequence[Fragment], locations: Sequence[Location]) -> None:
        self.fragments = fragments
        self._locations = locations
        self._moves: Moves | None = None

    def gather(self, views: Views, flats: Flats) -> None:
        """Copy the fragments to the flat tensors; a missing one counts as zeros."""
        moves = self._moves_from(views)
        moves.copy(_flat(_tensors(views, moves.here)), flats)

    def scatter(self, flats: Flats, views: Views) -> None:
        """Copy the flat tensors to the fragments, which must exist."""
        moves = self._moves_from(views)
        tensors = _tensors(views, moves.here)
        missing = [key for key, tensor in tensors.items() if tensor is None]
        assert not missing, f"no tensor to write {missing[0]} to"
        targets = _flat(tensors)
        moves.copy_back(flats, targets)
        for key, tensor in tensors.items():
            if not tensor.is_contiguous():  # so that the flat one is a copy
                tensor.copy_(targets[key].view(tensor.shape))

    def _moves_from(self, views: Views) -> Moves:
        if self._moves is None:
            here = locations(views, self.fragments)
            self._moves = Moves(zip(here, self._locations, (f.num_elements for f in self.fragments), strict=True))
            self.fragments = self._locations = ()
        return self._moves


def locations(views: Views, fragments: Iterable[Fragment]) -> list[Location]:
    """Of the fragments in this rank's tensors."""
    found: dict[Piece, Location] = {}
    for piece in dict.fromkeys(fragment.piece for fragment in fragments):
        found[piece] = views.locate(piece)
    return [Location(found[f.piece].tensor, found[f.piece].start + f.start) for f in fragments]


def read(views: Views, cuts: Cuts, *, device: torch.device) -> list[torch.Tensor]:
    """Flat views (of a copy where a tensor is not contiguous) of stretches; a missing one is zeros on `device`."""
    values = cuts.of(_flat(_tensors(views, cuts)))
    if any(value is None for value in values):
        zero = torch.zeros(1, dtype=torch.float32, device=device)
        return [zero.expand(size) if v is None else v for v, size in zip(values, cuts.sizes, strict=True)]
    return values


def _tensors(views: Views, cuts: Cuts) -> dict[Hashable, Any]:
    return {key: views.tensor(key) for key in cuts.tensors}


def _flat(tensors: dict[Hashable, torch.Tensor | None]) -> dict[Hashable, Any]:
    return {key: None if tensor is None else tensor.reshape(-1) for key, tensor in tensors.items()}
