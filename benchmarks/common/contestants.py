"""Who is measured against whom: plain DeepSpeed and the corners of the method, by ZeRO stage and precision."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sdp_deepspeed  # noqa: F401  (arms the seam)
from sdp_deepspeed.estimate.per_rank import Precision

CORNERS = list(itertools.product(("forward", "backward"), ("block", "neuron")))
STAGES = {0: "SDP, stage 0", 1: "SDP + ZeRO-1", 2: "SDP + ZeRO-2"}  # rows of DESIGN.md's table
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
    """One row of a result: plain DeepSpeed when `regime` is None."""

    stage: int
    regime: str | None = None
    strategy: str | None = None

    @property
    def name(self) -> str:
        if self.regime is None:
            return f"ZeRO-{self.stage}"
        return STAGES[self.stage].replace("SDP", f"{self.regime} x {self.strategy}")

    def runs_in(self, precision: str) -> bool:
        """DeepSpeed refuses fp32 sums at stage 0."""
        return self.stage > 0 or "accumulation" not in precision

    def config(self, precision: str, *, bucket: int, coverage: float, fused: bool = False) -> dict[str, Any]:
        """DeepSpeed's config; torch's optimizer either way, of which the fused one needs no scratch memory."""
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, "fused": fused}},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
            },
            **PRECISIONS[precision],
        }
        if self.regime is not None:
            block = {"coverage": coverage, "regime": self.regime, "strategy": self.strategy}
            config["subnetwork_data_parallel"] = block
        return config


def everybody(stages: tuple[int, ...] = tuple(STAGES)) -> list[Contestant]:
    """Plain DeepSpeed first."""
    plain = [Contestant(stage) for stage in stages]
    return plain + [Contestant(stage, *corner) for corner, stage in itertools.product(CORNERS, stages)]


@contextmanager
def engine_of(model_config: dict[str, Any], config: dict[str, Any]) -> Iterator[Any]:
    """An engine of a fresh Llama, and nothing of it left afterwards."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**model_config))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    del model
    try:
        yield engine
    finally:
        engine.destroy()
        del engine
        gc.collect()


def train(engine: Any, batch: torch.Tensor) -> None:
    """One optimizer step with all its micro-steps on the same tokens [sequences, length]."""
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
