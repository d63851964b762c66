"""Blocks of several texts in their shares: each sample's source by the seed, each source in its own order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sdp_deepspeed.data.block_order import BlockOrder, Blocks, Samples
from sdp_deepspeed.data.shuffle import shuffled
from sdp_deepspeed.data.source_mix import PERIOD


class MixedBlocks:
    """Of every PERIOD samples each source has its count, shuffled anew. A source that ends begins its next epoch.

    Args:
        orders: of the sources, all with one sequence length.
        counts: samples of each source in a period; their sum is PERIOD.
        seed: of the shuffle.
    """

    def __init__(self, orders: Sequence[BlockOrder], counts: Sequence[int], *, seed: int = 0) -> None:
        assert len(orders) == len(counts), (len(orders), len(counts))
        assert sum(counts) == PERIOD, counts
        self._orders, self._counts, self._seed = orders, counts, seed
        self._sources_of = lru_cache(maxsize=2)(self._draw)  # a batch lies in two periods at most
        self.sequence_length = orders[0].sequence_length

    @property
    def num_blocks(self) -> None:
        """Sources have epochs of their own."""
        return None

    def taken(self, num_samples: int) -> list[int]:
        """How many of the first samples come from each source."""
        periods, rest = divmod(num_samples, PERIOD)
        found = np.bincount(self._sources_of(periods)[:rest], minlength=len(self._counts))
        return [periods * count + int(more) for count, more in zip(self._counts, found, strict=True)]

    def _draw(self, period: int) -> Samples:
        """[PERIOD] sources of its samples."""
        places = shuffled(np.arange(PERIOD), num_items=PERIOD, seed=self._seed, epoch=period)
        return np.repeat(np.arange(len(self._counts)), self._counts)[places]

    def wait(self, first: int, stop: int) -> None:
        for order, begin, end in zip(self._orders, self.taken(first), self.taken(stop), strict=True):
            if end > begin:
                order.wait(begin, end)

    def blocks(self, samples: Samples) -> Blocks:
        places = [self._place(int(sample)) for sample in samples]
        rows: list[Any] = [None] * len(places)
        for number, order in enumerate(self._orders):
            mine = [i for i, (source, _) in enumerate(places) if source == number]
            if mine:
                blocks = order.blocks(np.array([places[i][1] for i in mine], dtype=np.int64))
                for i, block in zip(mine, blocks, strict=True):
                    rows[i] = block
        return np.stack(rows)

    def _place(self, sample: int) -> tuple[int, int]:
        """Source of a sample, and how many of that source's came before it."""
        period, place = divmod(sample, PERIOD)
        sources = self._sources_of(period)
        source = int(sources[place])
        return source, period * self._counts[source] + int((sources[:place] == source).sum())

    def position(self, num_samples: int) -> dict[str, Any]:
        sources = zip(self._orders, self.taken(num_samples), strict=True)
        return {"samples": num_samples, "sources": [order.position(taken) for order, taken in sources]}

    def go_to(self, position: dict[str, Any]) -> int:
        for order, one in zip(self._orders, position["sources"], strict=True):
            order.go_to(one)
        return int(position["samples"])

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "counts": list(self._counts),
            "of_sources": [order.identity() for order in self._orders],
        }
