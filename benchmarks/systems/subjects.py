"""Who is measured side by side: plain PyTorch, stock DeepSpeed, and the method in its modes, in groups that fit into
memory; each group has its baselines again, so that ratios are of the same minutes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.contestants import Contestant, build_engine
from benchmarks.common.models import Shape, num_parameters
from benchmarks.systems.plain import CLIPPING, build_ddp, build_fsdp2
from benchmarks.systems.sharded import build_sharded
from sdp_deepspeed.config import KEY, Mode

Kind = Literal["DDP", "DDP, activation checkpointing", "FSDP2", "DeepSpeed"]
BASELINE: Kind = "DDP"
STAGES = (0, 1, 2)
HOSTS = "hosts"  # the group of the method over each of its hosts
NEURON_COVERAGE = 0.5  # in that group, of the rows with neurons
# Of two layers at a time; DeepSpeed's defaults would keep all of so small a model on every rank.
_LAYERS_AT_ONCE = 2


@dataclass(frozen=True)
class Subject:
    """One row.

    Args:
        contestant: of the kind "DeepSpeed", plain or with a mode; of "FSDP2" with a mode, where the method is over it,
            at "stage 3", which it is most like.
        block: further keys of the method's block, with their values.
    """

    kind: Kind
    contestant: Contestant | None = None
    block: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        if self.contestant is None:
            return self.kind
        mode = self.contestant.mode
        if mode is None:
            return self.contestant.name
        name = f"{mode} + FSDP2" if self.kind == "FSDP2" else self.contestant.name
        return f"{name} C={self.contestant.coverage:g}"

    @property
    def trains(self) -> str:
        """The same for those whose losses must be the same: what they train. C = 1 is data parallelism."""
        if self.contestant is None or self.contestant.mode is None or self.contestant.coverage == 1:
            return "the dense model"
        return f"{self.contestant.mode} C={self.contestant.coverage:g} {self.contestant.subnetworks} {self.block}"

    def dense_model(self, shape: Shape) -> torch.nn.Module:
        """As it is before anybody divides it."""
        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**shape))
        return model

    def dense_shapes(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """Of all parameters of the dense model."""
        with torch.device("meta"):
            model = self.dense_model(shape)
        return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def build(self, shape: Shape, precision: str, *, micro_batch: int, bucket: int) -> Any:
        """Its engine, the same model on all ranks; a collective.

        Args:
            bucket: elements of a bucket.
        """
        if self.kind == "FSDP2" and self.contestant is None:
            return build_fsdp2(shape, precision)
        if self.contestant is None:
            return build_ddp(shape, precision, bucket=bucket, checkpointing=self.kind != BASELINE)
        config = self.contestant.config(precision, bucket=bucket, fused=True)
        config |= {"train_micro_batch_size_per_gpu": micro_batch, "gradient_clipping": CLIPPING}
        if self.block:
            config[KEY] |= dict(self.block)
        if self.kind == "FSDP2":
            return build_sharded(shape, precision, config[KEY])
        if self.contestant.stage == 3:
            config["zero_optimization"] |= sharded_weights(shape)
        engine = build_engine(shape, config)
        if self.contestant.stage == 3:  # weights that common/measured_step.py would not find
            engine.lacking_tensors = lambda: [parameter.ds_tensor for parameter in engine.module.parameters()]
        return engine


def sharded_weights(shape: Shape) -> dict[str, int]:
    """Settings with which ZeRO-3 keeps no more weights than it needs soon, as FSDP2 does."""
    one = num_parameters(shape | {"num_hidden_layers": 1}) - num_parameters(shape | {"num_hidden_layers": 0})
    soon = _LAYERS_AT_ONCE * one
    return {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": soon,
        "stage3_prefetch_bucket_size": one,
    }


def groups(modes: Sequence[Mode], stages: Sequence[int], coverages: Sequence[float]) -> dict[str, list[Subject]]:
    """By name: everybody who is plain; each mode at each stage with its coverages; the method over each of its hosts.
    The baseline is first."""
    found = {"plain": plain(stages)}
    for stage, mode in itertools.product(stages, modes):
        ours = [Subject("DeepSpeed", Contestant(stage, mode, coverage)) for coverage in coverages]
        stock = Subject("DeepSpeed", Contestant(stage))
        found[f"{mode}, stage {stage}"] = [Subject(BASELINE), stock, *ours]
    return found | {HOSTS: hosts(modes, stages, coverages)}


def hosts(modes: Sequence[Mode], stages: Sequence[int], coverages: Sequence[float]) -> list[Subject]:
    """Who shards weights, and the method over FSDP2 and over DeepSpeed with ZeRO: blocks at all coverages, neurons at
    one. All that FSDP2 can have, which is the forward regime."""
    forward = [mode for mode in modes if mode.regime == "forward"]
    cells = [(mode, c) for mode in forward for c in coverages if mode.strategy == "block" or c == NEURON_COVERAGE]
    over_fsdp2 = [Subject("FSDP2", Contestant(3, mode, coverage)) for mode, coverage in cells]
    sharding = [stage for stage in stages if stage > 0]
    over_deepspeed = [
        Subject("DeepSpeed", Contestant(stage, mode, coverage)) for stage in sharding for mode, coverage in cells
    ]
    return [Subject(BASELINE), Subject("FSDP2"), Subject("DeepSpeed", Contestant(3)), *over_fsdp2, *over_deepspeed]


def plain(stages: Sequence[int]) -> list[Subject]:
    """Without the method; ZeRO-3 with every choice of stages, as the method has none."""
    stock = [Subject("DeepSpeed", Contestant(stage)) for stage in (*stages, 3)]
    return [Subject(BASELINE), Subject("DDP, activation checkpointing"), *stock, Subject("FSDP2")]


def possible(coverages: Sequence[float], num_ranks: int) -> list[float]:
    """Those that so many ranks can have: a whole number of holders, of one at least."""
    return [coverage for coverage in coverages if coverage * num_ranks >= 1 and not coverage * num_ranks % 1]
