"""`sdp estimate` against what two ranks hold, send and compute: model state within 2%, the peak within 10%."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from benchmarks.common.held_bytes import optimizer_tensors, storage_bytes
from benchmarks.common.measured_step import StepFigures, measured_step
from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.config import KEY, MODES
from sdp_deepspeed.estimate.flop_counter import FlopCounter
from sdp_deepspeed.estimate.forecast import Forecast, forecast
from sdp_deepspeed.estimate.forecast import model_of as estimated_model
from sdp_deepspeed.fsdp import param_groups, sharded_model_of
from tests.helpers.fp16_runs import fp16_is_supported
from tests.helpers.ranks import Rank
from tests.helpers.sharded import sharded
from tests.helpers.training import engine_of

ROWS, LENGTH, RANKS = 4, 48, 2
BUCKET = 40_000  # elements
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_key_value_heads": 2}
    | {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 331, "max_position_embeddings": 64},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 331}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "resnet": {"model_type": "resnet", "layer_type": "basic", "embedding_size": 16, "hidden_sizes": [16, 32]}
    | {"depths": [3, 3], "image_size": 32},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16+fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def model_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    kind: Any = AutoModelForImageClassification if name == "resnet" else AutoModelForCausalLM
    model: nn.Module = kind.from_config(AutoConfig.for_model(**SHAPES[name]), dtype=dtype)
    return model


def loss_of(name: str, model: Any) -> torch.Tensor:
    if name == "resnet":
        dtype = next(parameter for parameter in model.parameters() if parameter.numel()).dtype
        return model(pixel_values=torch.ones(ROWS, 3, 32, 32, dtype=dtype), labels=torch.arange(ROWS) % 2).loss
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 331
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@dataclass(frozen=True)
class Case:
    """
    Args:
        block: None trains without subnetworks.
        extra: keys of the DeepSpeed config.
    """

    model: str = "llama"
    block: Mapping[str, Any] | None = field(default_factory=dict)
    stage: int = 1
    precision: str = "fp32"
    accumulation: int = 1
    checkpointing: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        zero = {"stage": self.stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
            **PRECISIONS[self.precision],
            **self.extra,
        }
        return config if self.block is None else config | {KEY: {"coverage": 0.5, **self.block}}

    def estimated(self, rank: int, host: str = "deepspeed") -> Forecast:
        length = None if self.model == "resnet" else LENGTH
        options: dict[str, Any] = {"sequence_length": length, "gradient_checkpointing": self.checkpointing}
        model = estimated_model(SHAPES[self.model], self.config, **options)
        return forecast(model, self.config, num_ranks=RANKS, host=host, rank=rank)

    def check(self, rank: Rank) -> None:
        with ExitStack() as stack:
            if self.precision == "fp16":
                stack.enter_context(fp16_is_supported())
            model: Any = model_of(self.model)
            if self.checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            engine = engine_of(self.config, model)
            self.step(engine)
            with measured_step(engine) as figures:
                self.step(engine)
        counters = sum(tensor.nbytes for tensor in optimizer_tensors(engine) if tensor.dim() == 0)
        if self.block is not None or rank.rank == 0:  # without the block the estimate is rank 0's
            compare(figures, self.estimated(rank.rank), counters)

    def step(self, engine: Any) -> None:
        for _ in range(self.accumulation):
            engine.backward(loss_of(self.model, engine))
            engine.step()


@dataclass(frozen=True)
class Sharded(Case):
    """Under FSDP2, whose policy computes in the precision's dtype."""

    def check(self, rank: Rank) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if self.precision == "bf16" else None
        model: Any = model_of(self.model)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = sharded(model, self.config[KEY], **({} if policy is None else {"mp_policy": policy}))
        optimizer = torch.optim.AdamW(param_groups(model), fused=True)
        self.step_of(model, optimizer)
        figures = StepFigures()
        with TrafficCounter() as traffic, FlopCounter() as counter, PeakBytes(_tensors_of(model, optimizer)) as peak:
            self.step_of(model, optimizer)
        for _ in range(self.accumulation):
            (loss_of(self.model, model) / self.accumulation).backward()
        sharded_model_of(model).reshard()
        held = [tensor for tensor in model.parameters() if tensor.numel()]
        states = [value for state in optimizer.state.values() for value in state.values()]
        figures.weights, figures.optimizer = storage_bytes(held), storage_bytes(states)
        figures.gradients = storage_bytes(parameter.grad for parameter in held if parameter.grad is not None)
        figures.sent, figures.flops, figures.peak = traffic.total, counter.total, peak.num_bytes
        counters = sum(value.nbytes for value in states if value.dim() == 0)
        compare(figures, self.estimated(rank.rank, "fsdp2"), counters)

    def step_of(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(self.accumulation):
            (loss_of(self.model, model) / self.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()


class PeakBytes(TorchDispatchMode):
    """The largest sum of storages that live inside the block, those that are resized too (FSDP2's gathered weights)."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.num_bytes = 0
        for tensor in tensors:
            self._add(tensor)

    def _add(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        live = [storage for reference in self._storages.values() if (storage := reference()) is not None]
        self.num_bytes = max(self.num_bytes, sum(storage.nbytes() for storage in live))
        return result


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.parameters(), *model.buffers(), *states]


def compare(figures: StepFigures, estimated: Forecast, counters: int) -> None:
    """Scalars that the optimizer counts steps with are not estimated."""
    found = {
        "weights": (figures.weights, estimated.rank.weights, 0.02),
        "gradients": (figures.gradients, estimated.rank.gradients, 0.02),
        "optimizer": (figures.optimizer - counters, estimated.rank.optimizer, 0.02),
        "sent": (figures.sent, estimated.rank.sent, 0.02),
        "peak": (figures.peak, estimated.peak, 0.1),
    }
    if figures.flops:
        found["FLOPs"] = (figures.flops, estimated.flops, 0.02)
    if figures.activations:
        found["activations"] = (figures.activations, estimated.activations, 0.1)
    wrong = [f"{name}: {m} measured, {e} estimated" for name, (m, e, most) in found.items() if abs(e - m) > most * m]
    assert not wrong, f"{wrong}, {figures}"


BACKWARD, NEURON = {"regime": "backward"}, {"strategy": "neuron"}
CASES = {
    "forward-block-stage1-bf16": Case(precision="bf16"),
    "forward-neuron-stage1": Case(block=NEURON),
    "backward-block-stage2-bf16": Case(block=BACKWARD, stage=2, precision="bf16"),
    "backward-neuron-stage1": Case(block=BACKWARD | NEURON),
    "accumulation-neuron-stage2": Case(block=NEURON, stage=2, accumulation=3),
    "plain-stage1-bf16": Case(block=None, precision="bf16"),
    "fsdp2-neuron-bf16": Sharded(block=NEURON, precision="bf16"),
    "fsdp2-whole": Sharded(block={"coverage": 1.0}),  # units that two ranks gather
}
FURTHER = {
    **{f"{model}-{mode}": Case(model, mode._asdict()) for model in ("gpt2", "resnet") for mode in MODES},
    **{name: Case(stage=2, precision=name) for name in PRECISIONS},
    **{f"plain-stage{stage}": Case(block=None, stage=stage) for stage in (0, 2)},
    "whole": Case(block={"coverage": 1.0}, precision="bf16"),
    "wire": Case(precision="bf16", extra={"communication_data_type": "fp32"}),
    "accumulation": Case(accumulation=3),
    "checkpointing": Case(checkpointing=True),
    "fsdp2-accumulation": Sharded(accumulation=3),
    "fsdp2-checkpointing": Sharded(checkpointing=True),
    "fsdp2-resnet": Sharded("resnet"),
}


@pytest.mark.world(RANKS)
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_estimate(rank: Rank, name: str) -> None:
    (CASES | FURTHER)[name].check(rank)
