"""A rank's share of every dense tensor that its team stores: trained parameters, and buffers that teams average.

Tensors are divided into pieces with the same holders (`Mask.pieces`). Of the elements of a piece, in their dense order,
rank r of P has the r-th of P equal parts, its share, in all teams that hold it. So rank r exchanges only with ranks r.
If tensor-parallel ranks divide a tensor, the P ranks are those with the same part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sdp_deepspeed.masking import Mask
from sdp_deepspeed.plan.tensors import persistent_buffers
from sdp_deepspeed.teams.attendance import Teams
from sdp_deepspeed.units import Piece

MAX_RANGE = 2**22  # elements of a share that are exchanged at once, and of a bucket


@dataclass(frozen=True)
class Share:
    """A rank's share of a piece.

    Args:
        holders: teams that train the piece, or run the module of a buffer.
        shape: of the piece.
        start, length: range of its elements.
        offset: position in this rank's vectors of anchors and momentum; None if the team does not store the piece.
        dense_offset: position in a vector of all shares.
    """

    piece: Piece
    holders: Teams
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int | None
    dense_offset: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This share of the piece's values."""
        return values.reshape(-1)[self.start : self.start + self.length]


@dataclass(frozen=True)
class Range:
    """A part of a share, which is exchanged at once."""

    holders: Teams
    length: int
    offset: int | None
    dense_offset: int
    is_buffer: bool

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        assert self.offset is not None
        return vector[self.offset : self.offset + self.length]


def shares_of(mask: Mask, rank: int, size: int, divided: Mapping[str, tuple[int, int]] | None = None) -> list[Share]:
    """Shares of all dense tensors, in the same order in all teams.

    Parameters that are frozen on all teams are left out: they do not change. Of buffers, running statistics and others
    in state dicts that are floating-point are averaged; the rest are constants.

    Args:
        rank, size: in the team.
        divided: rank and size among the ranks with the same part of a tensor that tensor-parallel ranks divide, by
            dense name.
    """
    everyone = tuple(range(mask.plan.num_subnetworks))
    tensors = {
        name: pieces
        for name, pieces in mask.pieces.items()
        if mask.trainable[name] or any(holders != everyone for _, holders in pieces)
    }
    for name in averaged_buffers(mask):
        is_backward = mask.plan.regime == "backward"  # all teams run all modules
        tensors[name] = [(piece, everyone if is_backward else of) for piece, of in mask.buffer_pieces[name]]
    shares, offset, dense_offset = [], 0, 0
    for name, pieces in tensors.items():
        rank_of_tensor, size_of_tensor = (divided or {}).get(name, (rank, size))
        for piece, holders in pieces:
            shape = list(mask.shapes[name])
            if piece.dim is not None:
                shape[piece.dim] = piece.length
            start, length = part(math.prod(shape), rank_of_tensor, size_of_tensor)
            is_stored = mask.is_stored(piece)
            shares.append(
                Share(piece, holders, tuple(shape), start, length, offset if is_stored else None, dense_offset)
            )
            offset += length * is_stored
            dense_offset += length
    return shares


def averaged_buffers(mask: Mask) -> list[str]:
    """Dense names of buffers that a meeting averages."""
    persistent, counts = persistent_buffers(mask.model), {f"{norm}.num_batches_tracked" for norm in mask.batch_norms}
    return [
        name
        for name, buffer in mask.buffers.items()
        if name in persistent and (buffer.is_floating_point() or name in counts)
    ]


def shares_by_name(shares: Iterable[Share]) -> dict[str, list[Share]]:
    """Shares of each dense tensor."""
    of_names: dict[str, list[Share]] = {}
    for share in shares:
        of_names.setdefault(share.piece.parameter, []).append(share)
    return of_names


def part(length: int, index: int, count: int) -> tuple[int, int]:
    """Start and length of the part with this index, of `count` nearly equal ones."""
    start = length * index // count
    return start, length * (index + 1) // count - start


def buckets(shares: Iterable[Share]) -> Iterator[list[Range]]:
    """Divide shares into buckets of about `MAX_RANGE` elements, the same in all teams."""
    bucket: list[Range] = []
    size = 0
    for share in shares:
        for start in range(0, share.length, MAX_RANGE):
            length = min(MAX_RANGE, share.length - start)
            offset = None if share.offset is None else share.offset + start
            bucket.append(
                Range(share.holders, length, offset, share.dense_offset + start, share.piece.kind == "buffer")
            )
            size += length
            if size >= MAX_RANGE:
                yield bucket
                bucket, size = [], 0
    if bucket:
        yield bucket


def num_elements(shares: Sequence[Share]) -> int:
    """Length of this rank's vectors."""
    return sum(share.length for share in shares if share.offset is not None)
