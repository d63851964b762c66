"""DeepSpeed as this program's host."""

from __future__ import annotations

import logging
import os
import textwrap
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.utils import logger
from torch import nn

import sdp_deepspeed  # noqa: F401  its import is what makes deepspeed.initialize() read our block
from sdp_deepspeed.config import SILENCE_LIMIT
from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.descriptors import allow_connections
from sdp_deepspeed.distributed.host_group import Channel, make_host_group
from sdp_deepspeed.distributed.lifeline import watch_ranks
from sdp_deepspeed.training import engines
from sdp_deepspeed.training.options import Options


class DeepSpeedHost:
    """Its engine is ours where the config has our block."""

    log: logging.Logger = logger
    # Some mistakes in its JSON it tells by assertion.
    user_errors: tuple[type[Exception], ...] = (DeepSpeedConfigError, AssertionError, NotImplementedError)

    def __init__(self, options: Options) -> None:
        self._options = options

    def start(self) -> None:
        """Process group and device; every rank calls it."""
        # The store and signs of life in it, the run's own group if that is over gloo, and the engine's.
        allow_connections(int(os.environ["WORLD_SIZE"]), logger.warning, num_groups=4)
        limit = self._options.step_limit
        deepspeed.init_distributed(**({} if limit is None else {"timeout": timedelta(seconds=limit)}))
        unlink_shared_memory()
        # Before the first collective of ours, which with NCCL needs each rank on its own device.
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # DeepSpeed 0.19.8 calls collectives by names that PyTorch 2.13 has renamed.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")

    def check(self) -> None:
        check_deepspeed_reads(self._options.deepspeed_config)

    def build(self, model: nn.Module) -> tuple[Any, Gatherer]:
        """An engine and all ranks; every rank calls it."""
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=self._options.deepspeed_config
        )
        world = world_of(engine)
        if engines.is_stock(engine):  # ours does so itself
            watch_ranks(engine, dist, world, SILENCE_LIMIT)
        return engine, world

    def close(self) -> None:
        close_process_group()


def unlink_shared_memory() -> None:
    """Unlink the buffers of DeepSpeed's operator for CPUs (66 MiB for each rank), which 0.19.8 leaves behind.

    Every rank has mapped them when `init_distributed` returns on all, and needs no name for them any more.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
    if dist.get_backend() == "gloo":
        dist.barrier()
        Path("/dev/shm", name).unlink(missing_ok=True)


def check_deepspeed_reads(config: Mapping[str, Any]) -> None:
    """Have DeepSpeed read its config before a model is built.

    Raises:
        ValueError: it cannot.
    """
    try:
        DeepSpeedConfig(dict(config))
    except Exception as error:  # of any kind: DeepSpeed checks few values before it computes with them
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"--deepspeed_config: DeepSpeed cannot read it: {type(error).__name__}: {reason}") from None


def world_of(engine: Any) -> Gatherer:
    """All ranks, for waits that may be long; every rank calls it once."""
    if not engines.is_stock(engine):
        return engine.world
    return make_host_group(dist, Communicator(dist), logger.warning).channel(Channel.WORLD)


def close_process_group() -> None:
    """Leave the process group, so that no rank is seen to vanish."""
    if dist.is_initialized():
        get_accelerator().synchronize()
        dist.destroy_process_group()
