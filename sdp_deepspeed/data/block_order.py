"""Which block is the n-th sample of a run: one order for all ranks, of all blocks there are, or of those that come.

Positions are counted in samples of all ranks, so that they mean the same for every number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sdp_deepspeed.data.growing import GrowingTokens
from sdp_deepspeed.data.journal import Place
from sdp_deepspeed.data.prepared import PreparedDataError
from sdp_deepspeed.data.shuffle import shuffled

Blocks = npt.NDArray[np.unsignedinteger[Any]]
Samples = npt.NDArray[np.int64]
DEFAULT_WINDOW = 8192


class BlockOrder(Protocol):
    """An endless order of blocks, of which any stretch can be asked for."""

    sequence_length: int

    @property
    def num_blocks(self) -> int | None:
        """In one epoch; None where that is not known (yet)."""
        ...

    def wait(self, first: int, stop: int) -> None:
        """Until samples `first` to `stop` can be taken."""
        ...

    def blocks(self, samples: Samples) -> Blocks:
        """[B, T] ids of these samples."""
        ...

    def position(self, num_samples: int) -> dict[str, Any]:
        """Where the order stands after so many samples, as plain JSON values, the same on every rank."""
        ...

    def go_to(self, position: dict[str, Any]) -> int:
        """How many samples that were."""
        ...

    def identity(self) -> dict[str, Any]:
        """What a position depends on."""
        ...


class ShuffledBlocks:
    """Blocks that are all there; each epoch is a new permutation of them.

    Args:
        blocks: [N, T] token ids, a memory map is fine.
        seed: of the order.
        data: identity of the blocks' content, checked on resume; "" is not checked.
    """

    def __init__(self, blocks: Blocks, *, seed: int = 0, data: str = "") -> None:
        self._blocks, self._seed, self._data = blocks, seed, data
        self._num_blocks, self.sequence_length = int(blocks.shape[0]), int(blocks.shape[1])

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def wait(self, first: int, stop: int) -> None:
        """They are there."""

    def blocks(self, samples: Samples) -> Blocks:
        return self._blocks[in_epochs(samples, self.num_blocks, self._seed)]

    def position(self, num_samples: int) -> dict[str, Any]:
        epoch, position = divmod(num_samples, self.num_blocks)
        return {"epoch": epoch, "position": position}

    def go_to(self, position: dict[str, Any]) -> int:
        return int(position["epoch"]) * self.num_blocks + int(position["position"])

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "num_blocks": self.num_blocks,
            "sequence_length": self.sequence_length,
            "data": self._data,
        }


class StreamedBlocks:
    """Blocks that are tokenized while training takes them.

    The first epoch goes through them window by window, each a permutation of `window` blocks, so that a sample does not
    depend on how many blocks there are already. Later epochs are permutations of all.

    Args:
        tokens: that grow.
        sequence_length: T.
        seed: of the order.
        window: blocks.
        data: identity of the text and its tokens.
    """

    def __init__(
        self,
        tokens: GrowingTokens,
        *,
        sequence_length: int,
        seed: int = 0,
        window: int = DEFAULT_WINDOW,
        data: str = "",
    ) -> None:
        self._tokens, self.sequence_length = tokens, sequence_length
        self._seed, self._window, self._data = seed, window, data
        self._reopen: Place | None = None

    @property
    def num_blocks(self) -> int | None:
        tokens = self._tokens.num_tokens
        return None if tokens is None else tokens // self.sequence_length

    def wait(self, first: int, stop: int) -> None:
        """PreparedDataError when there will be no more tokens: in the middle of a run no mistake is a ValueError."""
        try:
            self._wait(first, stop)
        except (ValueError, OSError) as error:
            raise PreparedDataError(str(error)) from error

    def _wait(self, first: int, stop: int) -> None:
        length, window = self.sequence_length, self._window
        if self.num_blocks is None or first < self.num_blocks:
            start, end = first // window * window, -(-stop // window) * window
            self._tokens.want(first=start * length, stop=(end + window) * length, reopen=self._reopen)
            self._tokens.wait("train", start * length, end * length)
        if self.num_blocks == 0:
            raise ValueError(
                f"the training split has less than one block of {length} tokens: give more text, or a shorter "
                "sequence_length"
            )
        if self.num_blocks is not None and stop > self.num_blocks:
            self._tokens.want(first=0, stop=math.inf)
            self._tokens.wait("train", 0, self.num_blocks * length)

    def blocks(self, samples: Samples) -> Blocks:
        num_blocks = self.num_blocks
        items = np.empty_like(samples)
        later = np.zeros(samples.shape, dtype=bool) if num_blocks is None else samples >= num_blocks
        for number in np.unique(samples[~later] // self._window):
            here = ~later & (samples // self._window == number)
            start = int(number) * self._window
            size = self._window if num_blocks is None else min(self._window, num_blocks - start)
            items[here] = start + shuffled(samples[here] - start, num_items=size, seed=self._seed, epoch=int(number))
        if num_blocks is not None and later.any():
            items[later] = in_epochs(samples[later], num_blocks, self._seed)
        return self._tokens.blocks("train", items, self.sequence_length)

    def position(self, num_samples: int) -> dict[str, Any]:
        """With the part of the stream where its window begins, so that a lost cache is written from there on."""
        num_blocks = self.num_blocks
        if num_blocks is not None and num_samples >= num_blocks:
            epoch, position = divmod(num_samples, num_blocks)
            return {"epoch": epoch, "position": position, "reopen": None}
        # The token before: every rank has seen its part, but not surely the next one.
        before = num_samples // self._window * self._window * self.sequence_length - 1
        place = self._tokens.journal.place_of(before) if before > 0 else None
        reopen = self._reopen if before > 0 and place is None else place
        return {"epoch": 0, "position": num_samples, "reopen": None if reopen is None else asdict(reopen)}

    def go_to(self, position: dict[str, Any]) -> int:
        if position["epoch"]:
            self._tokens.want(first=0, stop=math.inf)
            self._tokens.wait("train", 0, _ALL)
        elif position.get("reopen") is not None:
            self._reopen = Place(**position["reopen"])
        return int(position["epoch"]) * (self.num_blocks or 0) + int(position["position"])

    def identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "window": self._window,
            "sequence_length": self.sequence_length,
            "data": self._data,
        }


_ALL = 2**62


def in_epochs(samples: Samples, num_blocks: int, seed: int) -> Samples:
    """Blocks of samples where each epoch is a permutation of all."""
    items = np.empty_like(samples)
    epochs, positions = np.divmod(samples, num_blocks)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        items[here] = shuffled(positions[here], num_items=num_blocks, seed=seed, epoch=int(epoch))
    return items
