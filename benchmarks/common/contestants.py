"""Who is measured against whom: plain DeepSpeed and the modes of the method, by ZeRO stage and precision."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed  # noqa: F401  (so that DeepSpeed knows the config's block)
from benchmarks.common.models import Shape
from sdp_deepspeed.architectures import unit_costs
from sdp_deepspeed.config import KEY, MODES, Mode
from sdp_deepspeed.estimate.per_rank import Precision

Batch = torch.Tensor | Mapping[str, torch.Tensor]  # tokens [sequences, length]; or what a model takes, by name
STAGES = {0: "SDP, stage 0", 1: "SDP + ZeRO-1", 2: "SDP + ZeRO-2"}  # rows of the table of bytes per parameter
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


def bytes_of(precision: str) -> Precision:
    """Bytes per element of one of PRECISIONS."""
    return Precision.of("fp32" if precision == "fp32" else "bf16", accumulate_in_fp32="accumulation" in precision)


@dataclass(frozen=True)
class Contestant:
    """One row of a result: plain DeepSpeed when `mode` is None.

    Args:
        stage: of ZeRO.
        coverage: C, of the contestants that have a mode.
        subnetworks: k, if there are fewer than ranks.
    """

    stage: int
    mode: Mode | None = None
    coverage: float = 1.0
    subnetworks: int | None = None

    @property
    def name(self) -> str:
        """Without the coverage, which is the same for all in most results."""
        if self.mode is None:
            return f"ZeRO-{self.stage}"
        return STAGES[self.stage].replace("SDP", str(self.mode))

    def runs_in(self, precision: str) -> bool:
        """DeepSpeed refuses fp32 sums at stage 0."""
        return self.stage > 0 or "accumulation" not in precision

    def config(self, precision: str, *, bucket: int, fused: bool = False, overlap: bool = False) -> dict[str, Any]:
        """DeepSpeed's config.

        Args:
            bucket: elements of both kinds of buckets.
            fused: torch's AdamW that needs no scratch memory, instead of the one that does.
        """
        zero = {"stage": self.stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        adam = {"lr": 1e-4, "torch_adam": True, "fused": fused}  # said, or ours alone would choose the fused one
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": zero | {"overlap_comm": overlap},
            **PRECISIONS[precision],
        }
        if self.mode is not None:
            config[KEY] = {"coverage": self.coverage, **self.mode._asdict()}
            config[KEY] |= {"subnetworks": self.subnetworks} if self.subnetworks else {}
        return config


def everybody(coverage: float, stages: Sequence[int] = tuple(STAGES)) -> list[Contestant]:
    """Plain DeepSpeed first."""
    plain = [Contestant(stage) for stage in stages]
    return plain + [Contestant(stage, mode, coverage) for mode, stage in itertools.product(MODES, stages)]


def build_engine(shape: Shape, config: dict[str, Any]) -> Any:
    """An engine of a fresh Llama, the same on all ranks."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def spectral_gap(shape: Shape, engine: Any) -> float | None:
    """Of the engine's plan, units weighted by their parameters; None for plain DeepSpeed."""
    if not hasattr(engine, "plan"):
        return None
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    weights = [cost.num_parameters for cost in unit_costs(model, engine.plan.units)]
    return float(engine.plan.spectral_gap(weights))


@contextmanager
def engine_of(shape: Shape, config: dict[str, Any]) -> Iterator[Any]:
    """An engine, and nothing of it left afterward."""
    engine = build_engine(shape, config)
    try:
        yield engine
    finally:
        engine.destroy()
        del engine
        gc.collect()


def inputs_of(batch: Batch) -> Mapping[str, torch.Tensor]:
    """What a model takes by name."""
    return {"input_ids": batch, "labels": batch} if isinstance(batch, torch.Tensor) else batch


def train(engine: Any, batch: Batch) -> torch.Tensor:
    """One optimizer step with all its micro-steps on the same batch.

    Returns:
        The loss on this rank, of the last micro-step.
    """
    inputs = {name: tensor.to(engine.device) for name, tensor in inputs_of(batch).items()}
    for _ in range(engine.gradient_accumulation_steps()):
        loss = engine(**inputs).loss
        engine.backward(loss)
        loss = loss.detach()  # nothing of the pass is kept in the step
        engine.step()
    return loss
