"""Stretches of pieces: read from this rank's tensors into flat ones, and written back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.layout.places import in_order
from sdp_deepspeed.units import Piece

Views = Callable[[Piece], torch.Tensor | None]
"""From a piece to its view in this rank's tensors, shaped as in the dense model; None where there is no tensor."""


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


def read(views: Views, fragments: Sequence[Fragment], *, device: torch.device | None = None) -> list[torch.Tensor]:
    """Flat views (copies where a piece is not contiguous) of `fragments`; a missing piece reads as zeros."""
    flats: dict[Piece, torch.Tensor | None] = {}
    zero: torch.Tensor | None = None
    values = []
    for fragment in fragments:
        piece = fragment.piece
        if piece not in flats:
            view = views(piece)
            flats[piece] = None if view is None else in_order(piece, view).reshape(-1)
        flat = flats[piece]
        length = fragment.stop - fragment.start
        if flat is not None:
            values.append(flat.narrow(0, fragment.start, length))
            continue
        zero = torch.zeros(1, dtype=torch.float32, device=device) if zero is None else zero
        values.append(zero.expand(length))
    return values


def write(views: Views, fragments: Sequence[Fragment], values: Sequence[torch.Tensor]) -> None:
    """Copy flat `values` into `fragments`, converting the dtype; all pieces must exist."""
    targets: list[torch.Tensor] = []
    scattered: list[tuple[torch.Tensor, torch.Tensor]] = []
    flats: dict[Piece, torch.Tensor] = {}
    for fragment in fragments:
        piece = fragment.piece
        if piece not in flats:
            stored = views(piece)
            assert stored is not None, f"no tensor to write {piece.parameter} to"
            view = in_order(piece, stored)
            flats[piece] = view.reshape(-1)
            if not view.is_contiguous():
                scattered.append((view, flats[piece]))
        targets.append(flats[piece].narrow(0, fragment.start, fragment.stop - fragment.start))
    if targets:
        torch._foreach_copy_(targets, list(values))
    for view, flat in scattered:
        view.copy_(flat.view(view.shape))
