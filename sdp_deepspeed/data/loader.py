"""Blocks to batches: which rank sees which block when, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sdp_deepspeed.data.shuffle import shuffled

Blocks = npt.NDArray[np.unsignedinteger[Any]]
Batch = dict[str, torch.Tensor]

# Cross entropy skips labels of this value (torch.nn.functional.cross_entropy's default).
IGNORED_LABEL = -100
_STATE_VERSION = 1


def _batch(blocks: Blocks, items: npt.NDArray[np.int64]) -> Batch:
    tokens = torch.from_numpy(blocks[items].astype(np.int64))
    # Transformers' causal models shift the labels themselves.
    return {"input_ids": tokens, "labels": tokens.clone()}


def _check_shard(*, micro_batch: int, rank: int, world_size: int) -> None:
    if micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}, expected at least 1: set train_micro_batch_size_per_gpu")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0 <= rank < {world_size} data-parallel ranks")


class PackedBatches:
    """Endless training batches of one data-parallel rank; an iterator that never ends.

    One global order of samples runs through all epochs, each epoch a new permutation of all blocks. Micro-step
    `s` takes the next `world_size * micro_batch` samples of it, rank `r` the `r`-th run of `micro_batch`. So shards
    are disjoint, every rank has the same number of batches, nothing is dropped (a batch may begin in one epoch and
    end in the next), and a position counted in global samples means the same for every number of ranks.

    Args:
        blocks: [N, T] token ids, a memory map is fine.
        micro_batch: B, samples per rank and micro-step.
        rank, world_size: of the data-parallel group.
        seed: order of the blocks.
        data: identity of the blocks' content, checked on resume; "" is not checked.

    Raises:
        ValueError: fewer blocks than ranks * micro_batch.
    """

    def __init__(
        self, blocks: Blocks, *, micro_batch: int, rank: int = 0, world_size: int = 1, seed: int = 0, data: str = ""
    ) -> None:
        _check_shard(micro_batch=micro_batch, rank=rank, world_size=world_size)
        self.num_blocks, self.sequence_length = int(blocks.shape[0]), int(blocks.shape[1])
        if self.num_blocks < world_size * micro_batch:
            raise ValueError(
                f"the training split has {self.num_blocks} blocks of {self.sequence_length} tokens, one step of "
                f"{world_size} ranks with micro-batch {micro_batch} needs {world_size * micro_batch}: give more text, "
                "a shorter sequence_length or a smaller micro-batch"
            )
        self._blocks, self._micro_batch, self._rank, self._world_size = blocks, micro_batch, rank, world_size
        self._seed, self._data = seed, data
        self._num_samples = 0  # that all ranks together have taken since the start of training

    @property
    def epoch(self) -> float:
        """Passes over the training blocks so far."""
        return self._num_samples / self.num_blocks

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """`input_ids` and `labels`, int64 [B, T], on the CPU."""
        first = self._num_samples + self._rank * self._micro_batch
        batch = _batch(self._blocks, self._items(np.arange(first, first + self._micro_batch)))
        self._num_samples += self._world_size * self._micro_batch
        return batch

    def _items(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        items = np.empty_like(samples)
        epochs, positions = np.divmod(samples, self.num_blocks)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            items[here] = shuffled(positions[here], num_items=self.num_blocks, seed=self._seed, epoch=int(epoch))
        return items

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, the same on every rank; plain JSON values."""
        epoch, position = divmod(self._num_samples, self.num_blocks)
        return {"version": _STATE_VERSION, "epoch": epoch, "position": position} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly after the last batch before `state_dict()`, also with other ranks or micro-batches.

        Raises:
            ValueError: the state is of other data, another seed or sequence length: its position would mean nothing.
        """
        missing = [key for key in ("version", "epoch", "position", *self._identity()) if key not in state]
        if missing:
            raise ValueError(f"not a state of the data: it lacks {missing}, has {sorted(state)}")
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"the data's state has version {state['version']}, expected {_STATE_VERSION}")
        changed = [
            f"{key} was {state[key]!r}, is {now!r}"
            for key, now in self._identity().items()
            if state[key] != now and not (key == "data" and "" in (state[key], now))
        ]
        if changed:
            raise ValueError(
                f"cannot resume the position in the data: {'; '.join(changed)}. Use the interrupted run's data "
                "settings, or start a new run folder"
            )
        self._num_samples = int(state["epoch"]) * self.num_blocks + int(state["position"])

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "num_blocks": self.num_blocks,
            "sequence_length": self.sequence_length,
            "data": self._data,
        }


class ValidationBatch(NamedTuple):
    """One rank's batch and how many predicted tokens its mean loss stands for (0: padding only)."""

    inputs: Batch
    weight: int


class ValidationBatches:
    """The held-out blocks once, the same number of batches on every rank; may be iterated again and again.

    Blocks are disjoint over ranks and each is counted once: the dense validation loss is
    `sum(loss * weight) / sum(weight)` over all batches of all ranks. Where blocks run out, rows repeat others
    with ignored labels; a batch of nothing but padding keeps its labels (a mean over none would be NaN) and
    has weight 0.

    Args:
        blocks: [N, T] token ids.
        micro_batch: B, rows per batch and rank.
        rank, world_size: of the data-parallel group.
        limit: at most so many blocks, a fixed random sample; None means all.

    Raises:
        ValueError: no blocks.
    """

    def __init__(
        self, blocks: Blocks, *, micro_batch: int, rank: int = 0, world_size: int = 1, limit: int | None = None
    ) -> None:
        _check_shard(micro_batch=micro_batch, rank=rank, world_size=world_size)
        if len(blocks) == 0:
            raise ValueError("the validation split has no block: raise validation_fraction or give more text")
        self._blocks, self._micro_batch, self._rank, self._world_size = blocks, micro_batch, rank, world_size
        self.num_blocks = len(blocks) if limit is None else min(limit, len(blocks))

    def __len__(self) -> int:
        """Batches per rank, the same on every rank."""
        return -(-self.num_blocks // (self._world_size * self._micro_batch))

    def __iter__(self) -> Iterator[ValidationBatch]:
        for step in range(len(self)):
            first = (step * self._world_size + self._rank) * self._micro_batch
            yield self._at(np.arange(first, first + self._micro_batch))

    def _at(self, positions: npt.NDArray[np.int64]) -> ValidationBatch:
        num_real = int((positions < self.num_blocks).sum())
        # A fixed order: a limit then takes a random sample, which no seed of training changes.
        items = shuffled(positions % self.num_blocks, num_items=len(self._blocks), seed=0, epoch=0)
        batch = _batch(self._blocks, items)
        if num_real:
            batch["labels"][num_real:] = IGNORED_LABEL
        # The first token of a block is predicted from nothing, so it has no loss.
        return ValidationBatch(batch, num_real * (self._blocks.shape[1] - 1))
