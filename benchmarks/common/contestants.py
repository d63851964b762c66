"""Who is measured: PyTorch's DDP and FSDP2, DeepSpeed's ZeRO, and subnetwork data parallelism (SDP) over both hosts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed  # also so that DeepSpeed knows the config's block
from benchmarks.common.device import device
from benchmarks.common.models import Shape, num_parameters
from sdp_deepspeed.config import KEY, Mode
from sdp_deepspeed.fsdp import clip_grad_norm_, param_groups
from sdp_deepspeed.fsdp.sharded_model import is_sharded

Host = Literal["DeepSpeed", "DDP", "DDP, activation checkpointing", "FSDP2", "DiLoCo", "teams"]
PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
CLIPPING = 1.0
_LAYERS_AT_ONCE = 2  # that ZeRO-3 gathers; DeepSpeed's defaults would keep all of so small a model on every rank


@dataclass(frozen=True)
class Contestant:
    """One row of a result.

    Args:
        stage: of ZeRO, or the one that the host is most like.
        mode: of SDP; None for plain data parallelism.
        coverage: C, of those with a mode.
        host: what trains.
        every: steps of teams and DiLoCo between two synchronizations, H.
    """

    stage: int
    mode: Mode | None = None
    coverage: float = 1.0
    host: Host = "DeepSpeed"
    every: int = 1

    @property
    def name(self) -> str:
        host = f"ZeRO-{self.stage}" if self.host == "DeepSpeed" else self.host
        if self.mode is None:
            return host
        return f"{self.mode} + {host} C={self.coverage:g}"

    @property
    def trains(self) -> str:
        """Equal for contestants whose losses must be equal. C = 1 is data parallelism."""
        if self.mode is None or self.coverage == 1:
            return "the dense model"
        return f"{self.mode} C={self.coverage:g}"

    def is_possible(self, num_ranks: int) -> bool:
        """Whether so many ranks can have it: an integer number of holders, at least one."""
        return self.coverage * num_ranks >= 1 and not self.coverage * num_ranks % 1

    def config(self, precision: str, *, bucket: int, fused: bool = False, overlap: bool = False) -> dict[str, Any]:
        """DeepSpeed's config.

        Args:
            bucket: elements of both kinds of buckets.
            fused: torch's fused AdamW, which needs no scratch memory.
            overlap: `overlap_comm`.
        """
        zero = {"stage": self.stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": fused}},
            "zero_optimization": zero | {"overlap_comm": overlap},
            **PRECISIONS[precision],
        }
        if self.mode is not None:
            config[KEY] = {"coverage": self.coverage, **self.mode._asdict()}
        return config

    def build(self, shape: Shape, precision: str, *, micro_batch: int, bucket: int) -> Any:
        """Its engine on a fresh model, clipping gradients, with fused AdamW. Every rank calls it."""
        if self.host.startswith("DDP"):
            return _build_ddp(shape, precision, bucket=bucket, checkpointing=self.host != "DDP")
        config = self.config(precision, bucket=bucket, fused=True)
        if self.host == "FSDP2":
            return _build_fsdp2(shape, precision, config.get(KEY))
        if self.stage == 3:
            config["zero_optimization"] |= _sharded_weights(shape)
        config |= {"train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": CLIPPING}
        engine = build_engine(shape, config)
        if self.stage == 3:  # weights that measured_step would not find
            engine.absent_tensors = lambda: [parameter.ds_tensor for parameter in engine.module.parameters()]
        return engine


DDP = Contestant(0, host="DDP")
FSDP2 = Contestant(3, host="FSDP2")
BLOCK, NEURON, BACKWARD = Mode("forward", "block"), Mode("forward", "neuron"), Mode("backward", "block")
# Of compare.py: everybody who is plain, and the rows of SDP by which a user decides.
CONTESTANTS = (
    DDP,
    Contestant(0, host="DDP, activation checkpointing"),
    Contestant(1),
    Contestant(3),
    FSDP2,
    *(Contestant(1, BLOCK, coverage) for coverage in (1, 0.5, 0.25)),
    Contestant(1, NEURON, 0.5),
    Contestant(1, BACKWARD, 0.5),
    *(Contestant(3, mode, 0.5, host="FSDP2") for mode in (BLOCK, NEURON)),
)


class PlainEngine(torch.nn.Module):
    """Plain PyTorch behind the few calls that a training loop makes of DeepSpeed's engine.

    Args:
        module: whose parameters are trained.
        runs: what a forward pass calls: the module, or what wraps it.
        optimizer: torch's.
        stage: the ZeRO stage that it is most like, which says where gradients are.
        autocast: what a forward pass runs in.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        runs: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stage: int,
        autocast: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__()
        self.module, self.runs, self.optimizer = module, runs, optimizer
        self._stage, self._autocast = stage, autocast or nullcontext()

    @property
    def device(self) -> torch.device:
        return device()

    def zero_optimization_stage(self) -> int:
        return self._stage

    def forward(self, **batch: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        with self._autocast:
            return self.runs(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if is_sharded(self.module):
            clip_grad_norm_(self.module, CLIPPING)
        else:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIPPING)
        self.optimizer.step()

    def destroy(self) -> None:
        """What it holds goes with it."""


def _build_ddp(shape: Shape, precision: str, *, bucket: int, checkpointing: bool) -> PlainEngine:
    """fp32 weights; autocast for bf16. Gradients are views of its buckets, which saves a copy."""
    model = _fresh_model(shape)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    autocast = torch.autocast(device().type, torch.bfloat16) if precision != "fp32" else nullcontext()
    _silence_renamed_functions()
    parallel = DistributedDataParallel(
        model, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=max(1, bucket * 4 // 2**20)
    )
    return PlainEngine(model, parallel, _adamw(model.parameters()), stage=0, autocast=autocast)


def _build_fsdp2(shape: Shape, precision: str, block: Mapping[str, Any] | None) -> PlainEngine:
    """Plain: every layer sharded over all ranks, and the rest. With SDP's block: each unit over its holders. For bf16
    weights and gradients travel in bf16, and fp32 is stored and stepped."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision != "fp32" else None)
    model = _fresh_model(shape)
    _silence_renamed_functions()
    if block is not None:
        model = sdp_deepspeed.fully_shard(model, None, block, mp_policy=policy)
        return PlainEngine(model, model, _adamw(param_groups(model)), stage=3)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return PlainEngine(model, model, _adamw(model.parameters()), stage=3)


def _silence_renamed_functions() -> None:
    """torch 2.13 warns at every call of names that older versions need."""
    warnings.filterwarnings("ignore", ".* is deprecated", FutureWarning, r"torch|transformers|benchmarks")


def _sharded_weights(shape: Shape) -> dict[str, int]:
    """Settings with which ZeRO-3 keeps no more weights than it needs soon, as FSDP2 does."""
    one = num_parameters(shape | {"num_hidden_layers": 1}) - num_parameters(shape | {"num_hidden_layers": 0})
    return {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": _LAYERS_AT_ONCE * one,
        "stage3_prefetch_bucket_size": one,
    }


def _fresh_model(shape: Shape) -> Any:
    """The same on all ranks, on the device, where a large one takes no time."""
    torch.manual_seed(0)
    with device():
        return LlamaForCausalLM(LlamaConfig(**shape | {"use_cache": False}))


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def build_engine(shape: Shape, config: dict[str, Any]) -> Any:
    """DeepSpeed's, on a fresh Llama, the same on all ranks."""
    model = _fresh_model(shape)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine: Any, tokens: torch.Tensor) -> torch.Tensor:
    """One optimizer step on tokens [sequences, length].

    Returns:
        The loss on this rank.
    """
    tokens = tokens.to(engine.device)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    loss = loss.detach()  # nothing of the pass is kept in the step
    engine.step()
    return loss
