"""The method over FSDP2, without DeepSpeed, behind the calls of the plain engines."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import sdp_deepspeed
from benchmarks.common.models import Shape
from benchmarks.systems.plain import CLIPPING, PlainEngine, adamw, fresh_model, sharded_policy
from sdp_deepspeed.fsdp import clip_grad_norm_, param_groups, sharded_model_of
from sdp_deepspeed.plan.plan import Plan


class ShardedEngine(PlainEngine):
    """Clips the dense gradient, whose units are on several meshes."""

    @property
    def plan(self) -> Plan:
        """Who holds what."""
        return sharded_model_of(self.module).plan

    def clip(self) -> None:
        clip_grad_norm_(self.module, CLIPPING)


def build_sharded(shape: Shape, precision: str, block: Mapping[str, Any]) -> ShardedEngine:
    """Each unit sharded over its holders; dtypes and optimizer are those of plain FSDP2.

    Args:
        block: of a DeepSpeed config.
    """
    model = sdp_deepspeed.fully_shard(fresh_model(shape), None, block, mp_policy=sharded_policy(precision))
    return ShardedEngine(model, model, adamw(param_groups(model)), stage=3, autocast=nullcontext())
