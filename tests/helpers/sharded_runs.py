"""A run of the FSDP2 host: model, optimizer, schedule and checkpoints."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import sdp_deepspeed
from sdp_deepspeed.fsdp import CheckpointManager, param_groups
from tests.helpers.models import batches, llama, loss_of, two_groups
from tests.helpers.ranks import Rank


class ShardedRun:
    def __init__(self, model: Any = None, *, kind: type[Any] = torch.optim.AdamW, **block: Any) -> None:
        self.model: Any = sdp_deepspeed.fully_shard(model or llama(tied=True), None, {"holders": 1} | block)
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.optimizer = kind(param_groups(two_groups(trained)), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.checkpoints = CheckpointManager(self.model, self.optimizer, self.scheduler)

    def train(self, rank: Rank, num_steps: int, *, first: int = 0, seed: int = 1) -> list[float]:
        losses = []
        for step in itertools.islice(batches(rank.size, 1, seed), first, first + num_steps):
            loss = loss_of(self.model, step[rank.rank][0])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses
