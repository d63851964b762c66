"""Who trains one rank of a world of eight: data parallelism in three ways, and the method.

DDP and FSDP2 keep weights in fp32 and compute in bf16, as is usual; DeepSpeed's engines keep bf16 weights and fp32
masters. All clip by the norm and step with torch's fused AdamW.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.contestants import Contestant, train
from benchmarks.common.device import device
from benchmarks.common.models import Shape
from sdp_deepspeed.config import MODES

BUCKET = 50_000_000  # elements; at its default of 5e8 stock ZeRO allocates a GB whatever the model
COVERAGES = (1.0, 0.5, 0.25)
_CLIP = 1.0


class Rank(Protocol):
    """What trains."""

    @property
    def module(self) -> Any:
        """The model, as Transformers made it."""

    def step(self, tokens: torch.Tensor) -> None:
        """Forward, backward and the optimizer's step on [rows, length]."""

    def close(self) -> None:
        """Gives back what it can; its last reference must go too."""


@dataclass
class EngineRank:
    """One of DeepSpeed's engines."""

    engine: Any

    @property
    def module(self) -> Any:
        return self.engine.module

    def step(self, tokens: torch.Tensor) -> None:
        train(self.engine, tokens)

    def close(self) -> None:
        self.engine.destroy()


@dataclass
class PlainRank:
    """PyTorch's own.

    Args:
        wrapped: what is called.
        autocasts: whether weights are cast as they are used.
    """

    module: Any
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    autocasts: bool

    def step(self, tokens: torch.Tensor) -> None:
        with torch.autocast(device().type, torch.bfloat16) if self.autocasts else nullcontext():
            loss = self.wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.wrapped.parameters(), _CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.state.clear()


def build_model(shape: Shape, dtype: torch.dtype) -> Any:
    """Where the device is, so that a large one takes no time."""
    torch.manual_seed(0)
    with device():
        return LlamaForCausalLM(LlamaConfig(**shape)).to(dtype)


def ddp(shape: Shape) -> Rank:
    model = build_model(shape, torch.float32)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, lambda state, bucket: _averaged(bucket))  # it reads annotations, which are text
    return PlainRank(model, wrapped, _adamw(model), autocasts=True)


def _averaged(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does by itself; but it takes the result from the collective's future, and a fake one's is empty."""
    future: Any = torch.futures.Future(devices=[device()] if device().type == "cuda" else None)
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer, async_op=True).wait()
    future.set_result(buffer)
    result: torch.futures.Future[torch.Tensor] = future
    return result


def fsdp2(shape: Shape) -> Rank:
    model = build_model(shape, torch.float32)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return PlainRank(model, model, _adamw(model), autocasts=False)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


@dataclass(frozen=True)
class Engine:
    """Builds an engine of DeepSpeed's."""

    contestant: Contestant

    def __call__(self, shape: Shape) -> Rank:
        config = self.contestant.config("bf16", bucket=BUCKET, fused=True) | {"gradient_clipping": _CLIP}
        model = build_model(shape, torch.bfloat16)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        return EngineRank(engine)


def _of_the_method() -> dict[str, Callable[[Shape], Rank]]:
    return {f"{mode}, C={c:g}": Engine(Contestant(1, mode, c)) for mode in MODES for c in COVERAGES}


SUBJECTS: dict[str, Callable[[Shape], Rank]] = {
    "DDP": ddp,
    "ZeRO-1": Engine(Contestant(1)),
    "ZeRO-2": Engine(Contestant(2)),
    "FSDP2": fsdp2,
    **_of_the_method(),
}


def collect() -> None:
    """After the last reference to a rank: engines are in circles."""
    gc.collect()
    if device().type == "cuda":
        torch.cuda.empty_cache()
