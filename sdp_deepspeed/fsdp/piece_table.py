"""Which neurons or heads of a branch are held by whom, as pieces: what is held by the same ranks is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.cut_tensors import CutTensor
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.splittable import PIECES
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.plan import Plan

Holders = tuple[int, ...]


def holder_sets(plan: Plan) -> list[Holders]:
    """The distinct sets of ranks that hold a unit, or what is in none, in the order that numbers them."""
    everyone = tuple(range(len(plan.subnetwork_of_rank)))
    return sorted({everyone, *(plan.ranks_of(index) for index in range(len(plan.units)))})


class PieceTable:
    """The same on every rank.

    Args:
        model: the plan, and the dense tensors.
        branch: one that is cut.

    Attributes:
        sets: by their numbers in the plan the sets of holders that hold something of the branch, ascending.
    """

    def __init__(self, model: RankModel, branch: LocatedBranch) -> None:
        self._model = model
        self._branch = branch
        of_branch = {holders for _, _, holders in self._cells}
        self.sets: Mapping[int, Holders] = {
            number: holders for number, holders in enumerate(holder_sets(model.plan)) if holders in of_branch
        }

    @cached_property
    def cut(self) -> dict[str, CutTensor]:
        """By path in the body what runs over neurons or heads."""
        prefix = len(self._branch.root) + 1
        return {tensor.parameter[prefix:]: tensor for tensor in self._branch.cut_tensors}

    def name_of(self, number: int) -> str:
        """Of a piece's module."""
        return f"{self._branch.root}.{PIECES}.{number}"

    def cells(self, number: int) -> tuple[int, ...]:
        """Neurons or key/value heads of a piece."""
        own = [(start, length) for start, length, holders in self._cells if holders == self.sets[number]]
        return tuple(cell for start, length in own for cell in range(start, start + length))

    def tensors(self, number: int) -> dict[str, HeldTensor]:
        """Of a piece, by path in the body; also on ranks that lack it."""
        holders = self.sets[number]
        result = {}
        for path, cut in self.cut.items():
            parts = self._parts(cut.parameter)
            intervals = merged((start, length) for start, length, ranks in parts if ranks == holders)
            result[path] = HeldTensor(f"{self.name_of(number)}.{path}", cut.parameter, cut.dim, intervals, holders)
        return result

    @cached_property
    def _cells(self) -> list[tuple[int, int, Holders]]:
        """As `_parts`, of neurons or key/value heads."""
        tensor = next(tensor for tensor in self._branch.cut_tensors if tensor.cut.is_output)
        width = tensor.size // self._branch.num_cells
        return [(start // width, length // width, holders) for start, length, holders in self._parts(tensor.parameter)]

    def _parts(self, dense_name: str) -> Iterator[tuple[int, int, Holders]]:
        """Start, length and holders along the cut dim, in dense order."""
        for piece, holders in self._model.pieces["parameter", dense_name]:
            yield piece.start, piece.length, holders


def merged(parts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending (start, length), with neighbors as one."""
    result: list[tuple[int, int]] = []
    for start, length in parts:
        if result and sum(result[-1]) == start:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((start, length))
    return tuple(result)
