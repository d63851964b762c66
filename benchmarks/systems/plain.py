"""Plain PyTorch behind the few calls that a training loop makes of DeepSpeed's engine: DDP, and FSDP2."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.device import device
from benchmarks.common.models import Shape

CLIPPING = 1.0


class PlainEngine(torch.nn.Module):
    """One micro-step per step, gradients clipped as DeepSpeed's are.

    Args:
        module: whose parameters are trained.
        runs: what a forward pass calls: the module, or what wraps it.
        optimizer: torch's.
        stage: the ZeRO stage that it is most like, which tells where gradients are.
        autocast: what a forward pass runs in.
        scheduler: of the learning rate, stepped after each step.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        runs: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stage: int,
        autocast: AbstractContextManager[object],
        scheduler: Any = None,
    ) -> None:
        super().__init__()
        self.module, self.runs, self.optimizer, self.scheduler = module, runs, optimizer, scheduler
        self._stage, self._autocast = stage, autocast

    @property
    def device(self) -> torch.device:
        return device()

    def gradient_accumulation_steps(self) -> int:
        return 1

    def zero_optimization_stage(self) -> int:
        return self._stage

    def forward(self, **batch: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        with self._autocast:
            return self.runs(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIPPING)

    def step(self) -> None:
        self.clip()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def destroy(self) -> None:
        """What it holds goes with it."""


def build_ddp(
    shape: Shape, precision: str, *, bucket: int, checkpointing: bool = False, fused: bool = True
) -> PlainEngine:
    """Data parallelism, gradients as views of its buckets, which saves a copy; fp32 weights, autocast for bf16.

    Args:
        bucket: elements.
        checkpointing: activations of a layer are computed anew in the backward pass.
        fused: torch's fused AdamW.
    """
    model = fresh_model(shape)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    runs = in_ddp(model, bucket=bucket)
    autocast = torch.autocast(device().type, torch.bfloat16) if precision != "fp32" else nullcontext()
    return PlainEngine(model, runs, adamw(model.parameters(), fused=fused), stage=0, autocast=autocast)


def in_ddp(model: torch.nn.Module, *, bucket: int) -> torch.nn.Module:
    """
    Args:
        bucket: elements, in fp32.
    """
    _be_quiet()
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=max(1, bucket * 4 // 2**20)
    )


def build_fsdp2(shape: Shape, precision: str) -> PlainEngine:
    """Every layer sharded over all ranks, and what is in no layer; for bf16 it travels in bf16, and fp32 is stepped."""
    model, policy = fresh_model(shape), sharded_policy(precision)
    _be_quiet()
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return PlainEngine(model, model, adamw(model.parameters()), stage=3, autocast=nullcontext())


def sharded_policy(precision: str) -> MixedPrecisionPolicy:
    """Of FSDP2: what travels and is computed with; fp32 is stored and stepped."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision != "fp32" else None)


def _be_quiet() -> None:
    """New names of what older versions have too, at every call."""
    warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning, r"torch|transformers|benchmarks")


def fresh_model(shape: Shape) -> Any:
    """The same on all ranks."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).to(device())


def adamw(parameters: Any, *, fused: bool = True) -> torch.optim.Optimizer:
    """Side by side everybody's is fused.

    Args:
        parameters: or groups of them.
    """
    return torch.optim.AdamW(parameters, lr=1e-4, fused=fused)
