"""From a `DataConfig` to batches on every rank: rank 0 prepares the cache, all ranks open it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdp_deepspeed.data.config import DataConfig
from sdp_deepspeed.data.loader import PackedBatches, ValidationBatches
from sdp_deepspeed.data.packing import PreparedData
from sdp_deepspeed.data.prepare import prepare
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
        prepared: counts of documents, bytes and tokens, and the cache folder.
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
    folder = run_on_rank_0(
        communicator, lambda: prepare(config), poll_seconds=POLL_SECONDS if communicator.size > 1 else None
    )
    return run_on_all_ranks(
        communicator, lambda: _open(config, folder, micro_batch=micro_batch, rank=rank, world_size=world_size)
    )


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


def _open(config: DataConfig, folder: Path, *, micro_batch: int, rank: int, world_size: int) -> DataBundle:
    prepared = PreparedData.load(folder)
    train = PackedBatches(
        prepared.blocks("train", config.sequence_length),
        micro_batch=micro_batch,
        rank=rank,
        world_size=world_size,
        seed=config.seed,
        data=prepared.identity,
    )
    validation = None
    if config.validation_fraction > 0:
        validation = ValidationBatches(
            prepared.blocks("validation", config.sequence_length),
            micro_batch=micro_batch,
            rank=rank,
            world_size=world_size,
            limit=config.validation_blocks,
        )
    return DataBundle(prepared.tokenizer(), train, validation, prepared)
