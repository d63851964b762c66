"""The settings that combine with each other, as data: the axes of the oracle grid.

A combination is allowed if no row of the table refuses its config, which is what start-up asks too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.support.rows import Row
from sdp_deepspeed.support.table import matching_rows

STRATEGIES: Mapping[str, Any] = {
    "block": "block",
    "neuron": "neuron",
    "mixed": {"attention": "neuron", "mlp": "block"},
}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16+fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},  # sums in fp32
    "fp16": {"fp16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},  # bf16 over fp32 weights
}
AXES: Mapping[str, tuple[Any, ...]] = {
    "regime": ("forward", "backward"),
    "strategy": tuple(STRATEGIES),
    "stage": (0, 1, 2),
    "precision": tuple(PRECISIONS),
    "tensor_parallel": (1, 2),
    "offload": ("none", "cpu"),
    "accumulation": ("none", "engine", "caller"),
    "replicas": (1, 2),
    "overlap": (False, True),
}
NUM_MICRO_BATCHES = 3  # of a step with accumulation: a first, one between, a last


@dataclass(frozen=True)
class Combination:
    """A value of each axis.

    Args:
        accumulation: who ends a step of several micro-batches, or "none" with one micro-batch.
        replicas: data-parallel ranks that train one subnetwork.
        overlap: of communication with backward.
    """

    regime: str = "forward"
    strategy: str = "block"
    stage: int = 1
    precision: str = "fp32"
    tensor_parallel: int = 1
    offload: str = "none"
    accumulation: str = "none"
    replicas: int = 1
    overlap: bool = False

    def num_subnetworks(self, num_ranks: int) -> int:
        """k on a number of ranks."""
        return num_ranks // (self.tensor_parallel * self.replicas)

    def block(self, num_ranks: int) -> dict[str, Any]:
        """The config block, without holders. What has its default value is left out."""
        block = {"regime": self.regime, "strategy": STRATEGIES[self.strategy]}
        return block | ({"subnetworks": self.num_subnetworks(num_ranks)} if self.replicas > 1 else {})

    def config(self, num_ranks: int = 4, num_holders: int = 1) -> dict[str, Any]:
        """A DeepSpeed config that asks for this combination."""
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.overlap}
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": self.offload}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1 if self.accumulation == "none" else NUM_MICRO_BATCHES,
            "zero_optimization": zero,
            KEY: {"holders": num_holders} | self.block(num_ranks),
            **PRECISIONS[self.precision],
        }
        if self.accumulation == "caller":
            config["managed_gradient_accumulation"] = False
        if self.tensor_parallel > 1:
            config["tensor_parallel"] = {"autotp_size": self.tensor_parallel}
        return config


@cache
def refusals_of(combination: Combination) -> tuple[Row, ...]:
    """The rows that refuse a combination; none if it is allowed."""
    config = combination.config()
    block = parse(config)
    assert block is not None
    return tuple(row for row, _ in matching_rows(block, config) if row.state != "no effect")


def all_combinations() -> Iterator[Combination]:
    """Every combination of the axes' values, in their order."""
    return (Combination(*values) for values in itertools.product(*AXES.values()))
