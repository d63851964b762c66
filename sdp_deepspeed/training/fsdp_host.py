"""FSDP2 as this program's host; DeepSpeed need not be installed."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.descriptors import allow_connections
from sdp_deepspeed.distributed.lifeline import watch_ranks
from sdp_deepspeed.messages import listed
from sdp_deepspeed.training.fsdp_engine import ShardedEngine
from sdp_deepspeed.training.fsdp_settings import HOST, read_settings
from sdp_deepspeed.training.options import Options

_STEP_LIMIT = 600  # seconds, as DeepSpeed's
# Over gloo: the store and signs of life in it, the run's own group and that of the hosts, and those of holder sets.
_NUM_GROUPS = 16


class FsdpHost:
    """`fully_shard`, ours or (without the block) what equals torch's own."""

    log = logging.getLogger("sdp_deepspeed")
    user_errors: tuple[type[Exception], ...] = ()

    def __init__(self, options: Options) -> None:
        self._options = options

    def start(self) -> None:
        """Process group and device; every rank calls it."""
        _show_log(self.log)
        allow_connections(int(os.environ["WORLD_SIZE"]), self.log.warning, num_groups=_NUM_GROUPS)
        limit = timedelta(seconds=self._options.step_limit or _STEP_LIMIT)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or os.environ.get("DS_ACCELERATOR") == "cpu":  # a run on CPUs starts no GPU
            dist.init_process_group("gloo", timeout=limit)
            return
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if local_rank >= count:
            raise ValueError(
                f"{HOST}: local rank {local_rank} has no GPU of its own: this node has {count}; start fewer ranks, or "
                "set DS_ACCELERATOR=cpu"
            )
        torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(dist.get_default_backend_for_device(accelerator), timeout=limit)

    def check(self) -> None:
        """ValueError for a config that says what cannot be done, before a model is built."""
        settings = read_settings(self._options.deepspeed_config, dist.get_world_size())
        tried = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
        settings.optimizer.build([{"params": [tried]}])  # torch checks the values
        on_gpu = dist.get_backend() != "gloo"
        self._settings = replace(settings, pin_memory=settings.pin_memory and on_gpu)

    def build(self, model: nn.Module) -> tuple[Any, Gatherer]:
        """An engine and all ranks, which are watched from then on; every rank calls it."""
        if self._settings.idle and dist.get_rank() == 0:
            self.log.info(
                "%s shards weights, gradients and optimizer state, and has no use for these: %s",
                HOST,
                listed(self._settings.idle),
            )
        level = self.log.level
        if self._settings.block is None:  # the plan in which all ranks hold all says nothing
            self.log.setLevel(logging.WARNING)
        engine = ShardedEngine.build(model, self._settings)
        self.log.setLevel(level)
        watch_ranks(engine, dist, engine.world, self._settings.silence_limit)
        return engine, engine.world

    def close(self) -> None:
        """Leave the process group, so that no rank is seen to vanish."""
        if dist.is_initialized():
            if dist.get_backend() != "gloo":
                torch.accelerator.synchronize()
            dist.destroy_process_group()


def _show_log(log: logging.Logger) -> None:
    """On stderr, unless the program has a log of its own; Python shows nothing below a warning."""
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
