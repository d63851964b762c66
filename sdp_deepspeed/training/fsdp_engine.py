"""A model under FSDP2 behind the few calls that this program makes of DeepSpeed's engine."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from sdp_deepspeed.distributed.host_group import Channel, HostChannel
from sdp_deepspeed.fsdp.checkpoints import CheckpointManager
from sdp_deepspeed.fsdp.full_state import save_pretrained
from sdp_deepspeed.fsdp.mesh_groups import param_groups
from sdp_deepspeed.fsdp.norm import clip_grad_norm_
from sdp_deepspeed.fsdp.shard import fully_shard
from sdp_deepspeed.fsdp.sharded_model import sharded_model_of
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.training.fsdp_schedules import RateSchedule
from sdp_deepspeed.training.fsdp_settings import FsdpSettings

# Plain FSDP2, each layer and the rest sharded over all ranks: the same bits as without us.
_PLAIN: dict[str, Any] = {"coverage": 1.0, "granularity": "layer"}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class ShardedEngine(nn.Module):
    """One rank's. Gradients are averaged and sharded after each micro-step, as at ZeRO stages 2 and 3.

    Args:
        module: that `fully_shard` returned.
        optimizer: of its parameters.
        lr_scheduler: None leaves the rate as it is.

    Attributes:
        plan: None without the block.
        world: all ranks, for waits that may be long.
        step_events: none: monitors are DeepSpeed's.
    """

    is_fsdp = True  # and no stage of ZeRO
    step_events = None

    def __init__(
        self,
        module: nn.Module,
        settings: FsdpSettings,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: RateSchedule | None,
    ) -> None:
        super().__init__()
        sharded = sharded_model_of(module)
        self.module: Any = module
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.plan: Plan | None = None if settings.block is None else sharded.plan
        self.coverage = sharded.coverage
        self.device = _device(sharded.mesh.device_type)
        self.world: HostChannel = sharded.host.channel(Channel.WORLD)
        self.seq_data_parallel_group = sharded.mesh.get_group()
        self._settings = settings
        self._checkpoints = CheckpointManager(module, optimizer, lr_scheduler)
        self._micro_steps = 0
        self._norm: torch.Tensor | None = None

    @classmethod
    def build(cls, model: nn.Module, settings: FsdpSettings) -> ShardedEngine:
        """Shard a model, and make what steps it; every rank calls it.

        Raises:
            ValueError, RuntimeError: on all ranks, what `fully_shard` or torch's optimizer refuses.
        """
        module = fully_shard(
            model,
            None,
            _PLAIN if settings.block is None else settings.block,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=torch.bfloat16 if settings.bf16 else None,
                reduce_dtype=_DTYPES[settings.reduces_in] if settings.reduces_in else None,
            ),
            offload_policy=CPUOffloadPolicy(settings.pin_memory) if settings.offloads else OffloadPolicy(),
        )
        optimizer = settings.optimizer.build(param_groups(module))
        schedule = None if settings.rates is None else RateSchedule(optimizer, settings.rates)
        return cls(module, settings, optimizer, schedule)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)

    def backward(self, loss: torch.Tensor) -> None:
        """Of one micro-step, whose part of the step's mean it is."""
        (loss / self._settings.accumulation).backward()

    def step(self) -> None:
        """After each micro-step; the last one of a step moves the weights."""
        self._micro_steps += 1
        if self._micro_steps % self._settings.accumulation:
            return
        self._norm = clip_grad_norm_(self.module, self._settings.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._checkpoints.global_samples += self.train_batch_size()

    @property
    def global_steps(self) -> int:
        return self._checkpoints.global_steps

    def train_batch_size(self) -> int:
        """Sequences of a step, on all ranks."""
        return self._settings.micro_batch * self._settings.accumulation * dist.get_world_size()

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._settings.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._settings.accumulation

    def zero_optimization_stage(self) -> int:
        """That stores as this does."""
        return 3

    def get_lr(self) -> list[float]:
        """Of the next step."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Of the last step's averaged dense gradient, before clipping; None before the first one."""
        return self._norm

    def save_checkpoint(self, folder: str, *, tag: str, client_state: dict[str, Any]) -> None:
        self._checkpoints.save_checkpoint(folder, tag, client_state)

    def load_checkpoint(self, folder: str) -> tuple[str | None, dict[str, Any] | None]:
        return self._checkpoints.load_checkpoint(folder)

    def wait_for_checkpoint(self) -> None:
        self._checkpoints.wait_for_checkpoint()

    def save_pretrained(self, folder: str, tokenizer: Any = None) -> None:
        save_pretrained(self.module, folder, tokenizer)


def _device(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
