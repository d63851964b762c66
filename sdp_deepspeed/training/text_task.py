"""Pre-training on text, as a task of the training program."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.data import DataBundle, DataConfig, build
from sdp_deepspeed.data.progress import show_log
from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.training.evaluate import dense_validation_loss
from sdp_deepspeed.training.model import build_model, check_fits
from sdp_deepspeed.training.options import Options
from sdp_deepspeed.training.task import Batch


class TextTask:
    """A causal language model on blocks of tokens."""

    items = "tokens"

    def __init__(self, options: Options) -> None:
        self._options = options

    def check(self) -> None:
        self._data = DataConfig.from_dict(self._options.data)

    def build_model(self, *, deferred: bool) -> nn.Module:
        options = self._options
        return build_model(
            options.model,
            seed=options.seed,
            gradient_checkpointing=options.gradient_checkpointing,
            deferred=deferred,
        )

    def open_data(self, engine: Any, world: Gatherer) -> DataBundle:
        """This rank's share; tensor-parallel ranks have the same one."""
        if world.rank == 0:  # tokenizing may take hours
            show_log()
        group = engine.seq_data_parallel_group
        data = build(
            self._data,
            micro_batch=engine.train_micro_batch_size_per_gpu(),
            rank=dist.get_rank(group),
            world_size=dist.get_world_size(group),
            communicator=world,
        )
        check_fits(engine.module.config, data)
        return data

    def loss(self, engine: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = engine(**batch, use_cache=False).loss
        return loss

    def evaluate(self, engine: Any, data: Any) -> dict[str, float]:
        return dense_validation_loss(engine, data.validation)

    def before_export(self, engine: Any, data: Any) -> None:
        """Nothing."""

    def words(self, evaluation: dict[str, float]) -> str:
        return f"dense validation loss {evaluation['dense_validation_loss']:.4f}"

    def describe(self, data: Any) -> str:
        batches = data.train
        count = "" if batches.num_blocks is None else f"{batches.num_blocks} training "
        return f"{count}blocks of {batches.sequence_length} tokens"

    def preprocessor(self, data: Any) -> Any:
        return data.tokenizer

    def exported(self, folder: str) -> str | None:
        return None
