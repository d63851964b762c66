"""Blocks to batches: which rank sees which block when, and where a resumed run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sdp_deepspeed.data.block_order import BlockOrder, Blocks, Samples
from sdp_deepspeed.data.shuffle import shuffled

Batch = dict[str, torch.Tensor]

# Cross entropy skips labels of this value (torch.nn.functional.cross_entropy's default).
IGNORED_LABEL = -100
_STATE_VERSION = 1


def _batch(blocks: Blocks) -> Batch:
    tokens = torch.from_numpy(blocks.astype(np.int64))
    # Transformers' causal models shift the labels themselves.
    return {"input_ids": tokens, "labels": tokens.clone()}


def _check_shard(*, micro_batch: int, rank: int, world_size: int) -> None:
    if micro_batch < 1:
        raise ValueError(f"micro_batch is {micro_batch}, expected at least 1: set train_micro_batch_size_per_gpu")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, expected 0 <= rank < {world_size} data-parallel ranks")


class PackedBatches:
    """Endless training batches of one data-parallel rank; an iterator that never ends.

    One global order of samples runs through all epochs. Micro-step `s` takes the next `world_size * micro_batch`
    samples, rank `r` the `r`-th run of `micro_batch`. So shards are disjoint, every rank has the same number of
    batches, nothing is dropped (a batch may begin in one epoch and end in the next), and a position counted in global
    samples means the same for every number of ranks.

    Args:
        order: of the blocks.
        micro_batch: B, samples per rank and micro-step.
        rank, world_size: of the data-parallel group.

    Raises:
        ValueError: fewer blocks than ranks * micro_batch.
    """

    def __init__(self, order: BlockOrder, *, micro_batch: int, rank: int = 0, world_size: int = 1) -> None:
        self.sequence_length = order.sequence_length
        self._order, self._micro_batch, self._rank, self._world_size = order, micro_batch, rank, world_size
        self._num_samples = 0  # that all ranks together have taken since the start of training
        self.check(micro_batch)

    def check(self, micro_batch: int) -> None:
        """Whether batches may have this size.

        Raises:
            ValueError: as the constructor.
        """
        _check_shard(micro_batch=micro_batch, rank=self._rank, world_size=self._world_size)
        needed = self._world_size * micro_batch
        if self.num_blocks is not None and self.num_blocks < needed:
            what, cure = self._words()
            raise ValueError(
                f"the training split has {self.num_blocks} {what}, one step of {self._world_size} ranks with "
                f"micro-batch {micro_batch} needs {needed}: {cure}"
            )

    def _words(self) -> tuple[str, str]:
        """What it has, and what to do if that is too little."""
        return (
            f"blocks of {self.sequence_length} tokens",
            "give more text, a shorter sequence_length or a smaller micro-batch",
        )

    def _batch_of(self, samples: Samples) -> Batch:
        """Of these samples of the run."""
        return _batch(self._order.blocks(samples))

    @property
    def micro_batch(self) -> int:
        """B of the next batch. May be set between two batches: the position stays, so that steps of as many samples
        take the same blocks at any B."""
        return self._micro_batch

    @micro_batch.setter
    def micro_batch(self, value: int) -> None:
        self.check(value)
        self._micro_batch = value

    @property
    def num_blocks(self) -> int | None:
        """In one epoch; None for several sources, and where the end of the text is not known yet."""
        return self._order.num_blocks

    @property
    def epoch(self) -> float | None:
        """Passes over the training blocks so far; None where their number is."""
        return None if self.num_blocks is None else self._num_samples / self.num_blocks

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """`input_ids` and `labels`, int64 [B, T], on the CPU.

        Raises:
            PreparedDataError: what is tokenized during training cannot be; on every rank.
        """
        stop = self._num_samples + self._world_size * self._micro_batch
        # For those of all ranks, so that all learn of the end of a writer in the same step.
        self._order.wait(self._num_samples, stop)
        first = self._num_samples + self._rank * self._micro_batch
        batch = self._batch_of(np.arange(first, first + self._micro_batch))
        self._num_samples = stop
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, the same on every rank; plain JSON values."""
        return {"version": _STATE_VERSION} | self._order.position(self._num_samples) | self._order.identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly after the last batch before `state_dict()`, also with other ranks or micro-batches.

        Raises:
            ValueError: the state is of other data, another seed or sequence length: its position would mean nothing.
        """
        identity = self._order.identity()
        _check_tokenize(state, identity)
        missing = [key for key in ("version", *self._order.position(0), *identity) if key not in state]
        if missing:
            raise ValueError(f"not a state of the data: it lacks {missing}, has {sorted(state)}")
        if state["version"] != _STATE_VERSION:
            raise ValueError(f"the data's state has version {state['version']}, expected {_STATE_VERSION}")
        changed = [
            f"{key} was {state[key]!r}, is {now!r}"
            for key, now in identity.items()
            if state[key] != now and not (key == "data" and "" in (state[key], now))
        ]
        if changed:
            raise ValueError(
                f"cannot resume the position in the data: {'; '.join(changed)}. Use the interrupted run's data "
                "settings, or start a new run folder"
            )
        self._num_samples = self._order.go_to(state)


def _check_tokenize(state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Before and during training blocks have other orders, which a position of the other one does not fit."""
    was, now = _tokenize_of(state), _tokenize_of(identity)
    if was is not None and now is not None and was != now:
        raise ValueError(
            f'cannot resume the position in the data: the run was started with tokenize "{was}", now it is "{now}": '
            "set it back, or start a new run folder"
        )


def _tokenize_of(state: dict[str, Any]) -> str | None:
    sources = state.get("of_sources")
    first = sources[0] if isinstance(sources, list) and sources else state
    return "during" if "window" in first else "before" if "num_blocks" in first else None


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
        batch = _batch(self._blocks[items])
        if num_real:
            batch["labels"][num_real:] = IGNORED_LABEL
        # The first token of a block is predicted from nothing, so it has no loss.
        return ValidationBatch(batch, num_real * (self._blocks.shape[1] - 1))
