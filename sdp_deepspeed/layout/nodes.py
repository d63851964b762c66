"""Which data-parallel ranks are on one node, and what that means for shards: neighbors add up before anything leaves.

Pure: labels are handed in. A wrong one costs traffic, never correctness, as long as all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from heapq import heappop, heappush
from typing import Literal

Receivers = Literal["holders", "others", "all"]
"""Of what the owners of a segment send back."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a data-parallel group.

    Args:
        of_rank: for each rank the number of its node, in the order in which nodes first appear.
    """

    of_rank: tuple[int, ...]

    @classmethod
    def of(cls, labels: Sequence[Hashable]) -> Nodes:
        """From one label per rank; equal labels are one node."""
        numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        return cls(tuple(numbers[label] for label in labels))

    @classmethod
    def one(cls, size: int) -> Nodes:
        """All ranks on one node."""
        return cls((0,) * size)

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Of each node, ascending."""
        found: list[list[int]] = [[] for _ in set(self.of_rank)]
        for rank, node in enumerate(self.of_rank):
            found[node].append(rank)
        return tuple(map(tuple, found))

    def neighbors(self, rank: int) -> tuple[int, ...]:
        """All ranks on the node of `rank`, itself too."""
        return self.ranks[self.of_rank[rank]]

    def per_node(self, ranks: Sequence[int]) -> list[list[int]]:
        """`ranks` by node, in their order."""
        found: list[list[int]] = [[] for _ in self.ranks]
        for rank in ranks:
            found[self.of_rank[rank]].append(rank)
        return found

    def shard_order(self, holders: Sequence[int]) -> tuple[int, ...]:
        """Holders in the order of their shards, ascending on one node.

        Of the h holders that a node has, the i-th owns a shard in the i-th of h equal parts, as far as there is room:
        what it adds up for its node is one stretch around it, and all such stretches of a node are of one length.
        """
        return _shard_order(self, tuple(holders))


@cache
def _shard_order(nodes: Nodes, holders: tuple[int, ...]) -> tuple[int, ...]:
    """Place by place the holder whose part has begun and ends first, of those that are left."""
    size = len(holders)
    coming = sorted(
        (Fraction(index * size, len(ranks)), Fraction((index + 1) * size, len(ranks)), node, rank)
        for node, ranks in enumerate(nodes.per_node(holders))
        for index, rank in enumerate(ranks)
    )
    waiting: list[tuple[Fraction, int, int]] = []
    order: list[int] = []
    while len(order) < size:
        while coming and (coming[0][0] <= len(order) or not waiting):
            heappush(waiting, coming.pop(0)[1:])
        order.append(heappop(waiting)[-1])
    return tuple(order)
