"""The values of a branch that is split: whole tensors of the dense model, of shards that its holders store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sdp_deepspeed.fsdp.piece_table import PieceTable
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.shard_regions import ShardRegion, regions_of
from sdp_deepspeed.fsdp.splittable import PIECES
from sdp_deepspeed.units import Piece


class PieceValues:
    """
    Args:
        table: of the branch.
        pieces: modules by the numbers of their sets; sharded when values are read.
        tensors: the dense ones, by name, for their dtypes.
        shapes: of the dense ones, by name.
        rank: of this process.
    """

    def __init__(
        self,
        table: PieceTable,
        pieces: Mapping[int, nn.Module],
        tensors: Mapping[str, torch.Tensor],
        shapes: Mapping[str, torch.Size],
        rank: int,
    ) -> None:
        self._table = table
        self._pieces = pieces
        self._shapes = dict(shapes)
        self._rank = rank
        self.dtypes = {name: tensors[name].dtype for name in shapes}

    @property
    def num_bytes(self) -> int:
        """Of the dense tensors."""
        return sum(shape.numel() * self.dtypes[name].itemsize for name, shape in self._shapes.items())

    @cached_property
    def regions(self) -> list[ShardRegion]:
        """Where the shards of all pieces lie in the dense tensors, the same on every rank."""
        return [region for tensor in self._tensors() for region in regions_of(tensor, self._shapes[tensor.dense_name])]

    def read(self, region: ShardRegion) -> torch.Tensor:
        """What this rank, its owner, stores of it."""
        number, _, path = region.tensor.partition(f".{PIECES}.")[2].partition(".")
        piece: Any = self._pieces[int(number)]
        if not isinstance(piece.get_parameter(path), DTensor):  # a forward pass left it gathered
            piece.reshard()
        return region.in_shard(piece.get_parameter(path).detach().to_local())

    def allocate(self, device: torch.device) -> tuple[dict[str, torch.Tensor], dict[Piece, torch.Tensor]]:
        """The dense tensors by name, with what this rank stores; and where regions of others go in them."""
        values = {
            name: torch.empty(shape, dtype=self.dtypes[name], device=device) for name, shape in self._shapes.items()
        }
        targets: dict[Piece, torch.Tensor] = {}
        for region in self.regions:
            target = region.in_dense(values[region.dense_name])
            if region.owner == self._rank:
                target.copy_(self.read(region))
            else:
                targets[region.piece] = target
        return values, targets

    def scale(self, values: Mapping[str, torch.Tensor], num_ranks: int) -> None:
        """Multiply pieces of output projections by their coverage, in place."""
        outputs = {cut.parameter for cut in self._table.cut.values() if cut.cut.is_output}
        for tensor in self._tensors():
            for start, length in tensor.intervals if tensor.dense_name in outputs else ():
                view = values[tensor.dense_name].narrow(tensor.dim or 0, start, length)
                view.mul_(len(tensor.holders) / num_ranks)

    def _tensors(self) -> Iterator[HeldTensor]:
        for number in self._table.sets:
            yield from self._table.tensors(number).values()
