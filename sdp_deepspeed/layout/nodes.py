"""Which data-parallel ranks are on one node, and what that means for shards: neighbors add up before anything leaves.

Pure: labels are handed in. A wrong one costs traffic, never correctness, as long as all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
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
        """Holders in the order of their shards: those that are as far among the holders of their own node own
        neighboring shards, so that what one rank adds up for its node is one stretch. Ascending on one node."""
        place = {
            rank: Fraction(2 * index + 1, len(ranks))
            for ranks in self.per_node(holders)
            for index, rank in enumerate(ranks)
        }
        return tuple(sorted(holders, key=lambda rank: (place[rank], self.of_rank[rank])))

    def copies(self, holders: Sequence[int], receivers: Receivers) -> float:
        """The most that a rank packs or unpacks for a segment in one collective, in elements per element of it."""
        found = [1.0]
        asking = 0  # nodes that get the segment from others
        for ranks, own in zip(self.ranks, self.per_node(holders), strict=True):
            carriers = len(own) or len(ranks)
            others = {"holders": len(own), "others": len(ranks) - len(own), "all": len(ranks)}[receivers]
            if own or receivers != "holders":
                found.append((others - (receivers != "others" or not own)) / carriers)
                asking += not (own and receivers == "others")
        return max(*found, (asking - (receivers != "others")) / len(holders))
