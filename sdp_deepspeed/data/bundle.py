"""From a `DataConfig` to batches on every rank: tokens before or during training, opened by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sdp_deepspeed.data.block_order import BlockOrder, Blocks, ShuffledBlocks
from sdp_deepspeed.data.cache import Cache, open_caches, where
from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.growing import Writer
from sdp_deepspeed.data.loader import PackedBatches, ValidationBatches
from sdp_deepspeed.data.mixed_blocks import MixedBlocks
from sdp_deepspeed.data.prepare import prepare_all
from sdp_deepspeed.data.prepared import PreparedData
from sdp_deepspeed.data.shuffle import shuffled
from sdp_deepspeed.data.source_mix import shares
from sdp_deepspeed.data.streaming import open_streams, start_writers, validation_counts
from sdp_deepspeed.distributed.agreement import Gatherer, OneRank, run_on_all_ranks, run_on_rank_0
from sdp_deepspeed.distributed.communicator import Communicator

# Far below any process group's time limit (10 minutes with NCCL), since preparing a corpus may take hours.
POLL_SECONDS = 20.0


@dataclass(frozen=True)
class DataBundle:
    """What a training program needs of the data.

    Args:
        tokenizer: a Transformers tokenizer, for `save_pretrained` and sampling; the model's `vocab_size` must be
            at least `prepared.vocab_size`.
        train: endless batches of this rank.
        validation: held-out batches of this rank; None when `validation_fraction` is 0.
        prepared: counts of documents, bytes and tokens, and the cache folder; of the first source, and with tokenize
            "during" as far as it was there at start.
    """

    tokenizer: Any
    train: PackedBatches
    validation: ValidationBatches | None
    prepared: PreparedData


def build(
    config: DataConfig, *, micro_batch: int, rank: int = 0, world_size: int = 1, communicator: Gatherer | None = None
) -> DataBundle:
    """Prepare (rank 0 only, cached) and open the data. A collective of all data-parallel ranks.

    Args:
        micro_batch: samples per rank and micro-step, DeepSpeed's `train_micro_batch_size_per_gpu`.
        rank, world_size: of the data-parallel group.
        communicator: the ranks that prepare and open together; None takes torch.distributed's default group (nothing
            when there is one rank).

    Raises:
        ValueError: a mistake in the config or the data; the same on every rank.
        RuntimeError, OSError: preparing failed on rank 0, or a rank does not see the cache, or it is damaged
            (PreparedDataError). Raised on every rank.
    """
    if communicator is None:
        communicator = OneRank() if world_size == 1 else _default_group(world_size)
    poll = POLL_SECONDS if communicator.size > 1 else None
    shard = _Shard(micro_batch, rank, world_size)
    if config.during:
        caches = run_on_rank_0(communicator, lambda: open_caches(config), poll_seconds=poll)
        writers = start_writers(config, caches, communicator)
        return run_on_all_ranks(communicator, lambda: _open_streams(config, caches, writers, shard))
    folders = run_on_rank_0(communicator, lambda: prepare_all(config), poll_seconds=poll)
    return run_on_all_ranks(communicator, lambda: _open(config, folders, shard))


def _default_group(num_ranks: int) -> Communicator:
    """torch.distributed's, which must have as many ranks."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"data for {num_ranks} ranks needs torch.distributed: call deepspeed.init_distributed() before build(), or "
            "pass communicator="
        )
    communicator = Communicator(dist)
    if communicator.size != num_ranks:
        raise ValueError(
            f"the process group has {communicator.size} ranks, the data {num_ranks} data-parallel ranks: pass "
            "communicator=Communicator(torch.distributed, group) with the data-parallel group"
        )
    return communicator


@dataclass(frozen=True)
class _Shard:
    """Which batches are this rank's."""

    micro_batch: int
    rank: int
    world_size: int

    def train(self, config: DataConfig, orders: Sequence[BlockOrder]) -> PackedBatches:
        """Of one source, or of several in their shares."""
        order = orders[0]
        if config.sources is not None:
            order = MixedBlocks(orders, shares(config.sources)[0], seed=config.seed)
        return PackedBatches(order, micro_batch=self.micro_batch, rank=self.rank, world_size=self.world_size)

    def validation(self, held_out: Sequence[Blocks], limit: int | None = None) -> ValidationBatches | None:
        """Of all sources together."""
        if not held_out:
            return None
        blocks = held_out[0] if len(held_out) == 1 else np.concatenate(held_out)
        return ValidationBatches(
            blocks, micro_batch=self.micro_batch, rank=self.rank, world_size=self.world_size, limit=limit
        )


def _open_streams(config: DataConfig, caches: Sequence[Cache], writers: Sequence[Writer], shard: _Shard) -> DataBundle:
    streams = open_streams(config, caches, writers)
    held_out = [stream.held_out for stream in streams if stream.held_out is not None]
    train = shard.train(config, [stream.order for stream in streams])
    return DataBundle(streams[0].tokenizer, train, shard.validation(held_out), streams[0].prepared)


def _open(config: DataConfig, folders: Sequence[Path], shard: _Shard) -> DataBundle:
    sources = [PreparedData.load(folder) for folder in folders]
    orders = [
        ShuffledBlocks(source.blocks("train", config.sequence_length), seed=config.seed, data=source.identity)
        for source in sources
    ]
    for source, order in zip(config.each_source(), orders, strict=True):
        if order.num_blocks == 0:
            raise ValueError(
                f"{where(source)}: less than one block of {config.sequence_length} tokens to train on: give more text, "
                "or a shorter sequence_length"
            )
    train, limit = shard.train(config, orders), config.validation_blocks
    held_out: list[Blocks] = []
    if config.validation_fraction > 0:
        held_out = [source.blocks("validation", config.sequence_length) for source in sources]
    if config.sources is not None:
        held_out = [_sample(blocks, count) for blocks, count in zip(held_out, validation_counts(config), strict=False)]
        limit = None
    return DataBundle(sources[0].tokenizer(), train, shard.validation(held_out, limit), sources[0])


def _sample(blocks: Blocks, count: int) -> Blocks:
    """As many of them, always the same."""
    count = min(count, len(blocks))
    return blocks[shuffled(np.arange(count), num_items=max(1, len(blocks)), seed=0, epoch=0)]
