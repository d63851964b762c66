"""Tensor parallelism as coordinates: the part of each dense tensor that a rank stores.

Plans use coordinates of the dense model (plan.json). Masking and buckets use the tensors of a rank, and therefore the
local plan. A unit has equal pieces in every shard, so all ranks of a group have the same local plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import Zeros
from sdp_deepspeed.architectures.cut_tensors import CutTensor
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece, Unit


@dataclass(frozen=True)
class Division:
    """Division of a dense tensor among a tensor-parallel group: its shards are concatenated along one dim.

    Args:
        lengths: number of indices along `dim` on each rank.
    """

    shape: tuple[int, ...]
    dim: int
    lengths: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        return len(set(self.lengths)) == 1

    def num_elements(self, index: int) -> int:
        """Number of elements of a rank's shard."""
        return prod(self.shape) // self.shape[self.dim] * self.lengths[index]


@dataclass(frozen=True)
class TensorParallelShards:
    """The shards of one rank of a tensor-parallel group.

    Args:
        index: index of the rank in the group.
        divisions: divisions of divided parameters, by dense name; other tensors are equal on all ranks of the group.
    """

    index: int
    size: int
    divisions: Mapping[str, Division]

    def part(self, name: str, dense: torch.Tensor) -> torch.Tensor:
        """View of this rank's part in a dense tensor with the shape of a divided parameter."""
        division = self.divisions[name]
        return dense.narrow(division.dim, sum(division.lengths[: self.index]), division.lengths[self.index])

    @torch.no_grad()
    def join(self, name: str, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The dense tensor of a divided parameter, of which each rank has a part; collective in the tensor-parallel
        group."""
        dense = part.new_zeros(self.divisions[name].shape)
        self.part(name, dense).copy_(part)
        dist.all_reduce(dense, group=group)  # exact, since others add zeros; parts may have different sizes
        return dense

    def division_of(self, piece: Piece) -> Division | None:
        """Division of the piece's tensor; None if it is not divided."""
        return self.divisions.get(piece.parameter) if piece.kind == "parameter" else None

    def dense_unit(self, unit: Unit) -> Unit:
        """Convert a unit from coordinates of a shard to those of the dense model: each of its slices occurs in every
        shard."""
        return Unit(unit.name, tuple(dense for piece in unit.pieces for dense in self._dense_pieces(piece)))

    def _dense_pieces(self, piece: Piece) -> Iterator[Piece]:
        division = self.division_of(piece)
        if division is None:
            yield piece
        elif piece.dim is None:
            yield replace(piece, length=prod(division.shape))
        else:
            width = self._width(division, piece)
            for index in range(self.size):
                yield replace(piece, start=piece.start + index * width)

    def local_plan(self, plan: Plan) -> Plan:
        """Convert a plan from dense coordinates to those of this rank's tensors.

        Raises:
            ValueError: the pieces of a unit differ between shards.
        """
        return replace(plan, units=tuple(map(self._local_unit, plan.units))) if self.divisions else plan

    def _local_unit(self, unit: Unit) -> Unit:
        slices: dict[str, list[Piece]] = {}
        for piece in unit.pieces:
            if piece.dim is not None and self.division_of(piece) is not None:
                slices.setdefault(piece.parameter, []).append(piece)
        pieces: list[Piece] = []
        for piece in unit.pieces:
            if piece.parameter not in slices:
                pieces.append(self.local_piece(piece))
            elif piece is slices[piece.parameter][0]:
                pieces.extend(self._equal_slices(unit, slices[piece.parameter]))
        return Unit(unit.name, tuple(pieces))

    def local_piece(self, whole: Piece) -> Piece:
        """Convert a piece that is a whole tensor to this rank's coordinates."""
        division = self.division_of(whole)
        return whole if division is None else replace(whole, length=division.num_elements(self.index))

    def _equal_slices(self, unit: Unit, pieces: list[Piece]) -> list[Piece]:
        """The slices of a unit in each shard of a tensor, which must be equal."""
        division = self.divisions[pieces[0].parameter]
        width = self._width(division, pieces[0])
        slices: list[list[tuple[int, int]]] = [[] for _ in range(self.size)]  # start and length, by shard
        for piece in pieces:
            start, stop = piece.start, piece.start + piece.length
            for index in range(start // width, min(-(-stop // width), self.size)):
                low, high = max(start - index * width, 0), min(stop - index * width, width)
                slices[index].append((low, high - low))
        if any(sorted(of_shard) != sorted(slices[0]) for of_shard in slices):
            texts = [", ".join(f"[{a}, {a + n})" for a, n in of_shard) or "nothing" for of_shard in slices]
            words = listed(texts, separator="; ")
            raise ValueError(
                f"plan: unit {unit.name!r} takes different pieces of {pieces[0].parameter!r} in the {self.size} "
                f"tensor-parallel shards: {words}; use a plan made with {self.size} tensor-parallel ranks, or blocks"
            )
        return [replace(pieces[0], start=start, length=length) for start, length in slices[0]]

    def _width(self, division: Division, piece: Piece) -> int:
        """Number of indices of a shard along the dim of a piece, which must be the divided one."""
        if not division.is_even or piece.dim != division.dim:
            raise ValueError(
                f"{piece.parameter!r} is divided along dim {division.dim} into {division.lengths}, so units cannot "
                f"have equal pieces of its shards along dim {piece.dim}"
            )
        return division.lengths[0]

    def local_branch(self, branch: LocatedBranch) -> LocatedBranch:
        """Convert a branch of the dense model to this rank's part.

        Raises:
            ValueError: the group's size does not divide its neurons or heads.
        """
        divided = [piece.parameter for piece in branch.pieces if self.division_of(piece) is not None]
        uneven = [f"{name} into {self.divisions[name].lengths}" for name in divided if not self.divisions[name].is_even]
        if uneven or (divided and branch.num_cells % self.size):
            cells = "key/value heads" if branch.description.inner and branch.description.inner.heads else "neurons"
            raise ValueError(
                f"tensor_parallel.autotp_size: got {self.size}, which does not divide the {branch.num_cells} {cells} "
                f"of {branch.name!r}{f' ({uneven[0]})' if uneven else ''}; use a size that divides them"
            )
        description = replace(branch.description, zeros=self._local_zeros(branch))
        local = replace(branch, description=description, pieces=tuple(map(self.local_piece, branch.pieces)))
        if branch.uncuttable_reason or not divided:
            return local
        uncuttable_reason = next(filter(None, map(self._uncuttable_reason, branch.cut_tensors)), "")
        tensors = tuple(replace(tensor, size=tensor.size // self.size) for tensor in branch.cut_tensors)
        return replace(
            local, num_cells=branch.num_cells // self.size, cut_tensors=tensors, uncuttable_reason=uncuttable_reason
        )

    def _local_zeros(self, branch: LocatedBranch) -> tuple[Zeros, ...]:
        """What bodies of an absent branch return here, where they are divided along their outputs."""
        local = []
        for name, zeros in zip(branch.bodies, branch.description.zeros, strict=False):
            division = self.divisions.get(f"{name}.weight")
            is_divided = division is not None and division.dim == 0 and division.shape[0] == zeros.size
            local.append(replace(zeros, size=division.lengths[self.index]) if division and is_divided else zeros)
        return tuple(local)

    def _uncuttable_reason(self, tensor: CutTensor) -> str:
        division = self.divisions.get(tensor.parameter)
        if division is not None and division.dim == tensor.dim and len(tensor.shares) == 1:
            return ""
        return f"tensor parallelism does not divide {tensor.parameter} along its neurons or heads (dim {tensor.dim})"


UNDIVIDED = TensorParallelShards(0, 1, {})
"""Without tensor parallelism."""
