"""What one rank has of the model, as one value: who holds what, and where this rank's pieces lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.shards import UNDIVIDED, Shards
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Piece


@dataclass(frozen=True)
class RankModel:
    """A plan and the tensors that it is about.

    Args:
        plan: in the coordinates of this tensor-parallel rank's tensors.
        tensors: the parameters in model order, as they were before units were dropped; once there is an optimizer, with
            their param groups.
        views: where pieces lie in this rank's tensors.
        rank: of this process in the data-parallel group.
        shards: what this rank of a tensor-parallel group stores.
        on_nodes: where the data-parallel ranks are; None if they are on one node.
    """

    plan: Plan
    tensors: tuple[TensorInfo, ...]
    views: PieceViews
    rank: int = 0
    shards: Shards = UNDIVIDED
    on_nodes: Nodes | None = None

    @property
    def nodes(self) -> Nodes:
        """Of the data-parallel ranks."""
        return self.on_nodes or Nodes.one(len(self.plan.subnetwork_of_rank))

    @property
    def stores_all(self) -> bool:
        """Whether this rank stores what it does not hold too (backward regime)."""
        return self.plan.regime == "backward"

    def holds(self, unit: int) -> bool:
        """Whether this rank holds the unit of index `unit`."""
        return self.plan.holds_rank(unit, self.rank)

    @cached_property
    def pieces(self) -> dict[tuple[str, str], list[tuple[Piece, tuple[int, ...]]]]:
        """Per (kind, name) the pieces of each tensor in order, with the ranks that hold them."""
        return pieces_by_tensor(self.tensors, self.plan)

    def pieces_with_storing_ranks(self) -> Iterator[tuple[Piece, tuple[int, ...]]]:
        """All pieces, each with the ranks that store it: its holders, in the backward regime all."""
        everyone = tuple(range(len(self.plan.subnetwork_of_rank)))
        for pieces in self.pieces.values():
            for piece, holders in pieces:
                yield piece, everyone if self.stores_all else holders

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The module's parameters by dense name."""
        tensors = {info.name: self.views.tensors[info.name] for info in self.tensors}
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.nn.Parameter)}
