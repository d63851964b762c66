"""The fewest bytes that a rank can send in a step (DESIGN.md section 1); n ranks, h holders of a unit.

- DDP, ZeRO-0 to 2: each gradient is averaged, and the average or the stepped weight returns to all ranks: (n-1)/n each
  way. DeepSpeed's ZeRO-1 and 2 send half as much again, since they all-reduce gradients.
- ZeRO-3 and FSDP2 gather a layer's weights for forward and for backward and scatter its gradients: 3 (n-1)/n. The last
  layer, and what is in none, is needed last in forward and first in backward: 2 (n-1)/n.
- SDP over FSDP2: 3 (h-1)/h of each unit that the rank holds, 2 (h-1)/h of those of the last layer.
- SDP over DeepSpeed: (h-1)/h of each unit's gradient; what a holder owns (1/h) returns to the other holders, in the
  backward regime to all other ranks. What is shared has n holders.

Scalars (norm, overflow) and padding are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from benchmarks.common.contestants import Contestant, dense_shapes, pieces_of
from benchmarks.common.models import Shape, num_parameters


def fewest_bytes(contestant: Contestant, engine: Any, shape: Shape, precision: str) -> float:
    """That this rank can send.

    Args:
        engine: the contestant's; one with a mode has a plan.
    """
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    size = 2 if precision == "bf16" and not contestant.host.startswith("DDP") else 4  # DDP's gradients stay fp32
    total = sum(map(math.prod, dense_shapes(shape).values()))
    sharded = contestant.stage == 3
    if contestant.mode is None:
        once = num_parameters(shape | {"num_hidden_layers": 1}) if sharded else total
        return size * (2 * once + 3 * (total - once)) * (num_ranks - 1) / num_ranks
    last_layer = f"model.layers.{shape['num_hidden_layers'] - 1}." if sharded else ""
    return size * elements_of_plan(engine.plan, dense_shapes(shape), rank, last_layer=last_layer)


def elements_of_plan(plan: Any, shapes: Mapping[str, tuple[int, ...]], rank: int, *, last_layer: str = "") -> float:
    """Fewest elements that a rank sends with SDP.

    Args:
        shapes: of the dense model's parameters.
        last_layer: what its parameters' names begin with, over FSDP2; empty over DeepSpeed.
    """
    num_ranks = len(plan.subnetwork_of_rank)
    shared, sent = sum(map(math.prod, shapes.values())), 0.0
    for name, size, holders in pieces_of(plan, shapes):
        shared -= size
        if rank not in holders:
            continue
        others = len(holders) - 1
        returned_to = num_ranks - 1 if plan.regime == "backward" else others
        if last_layer and not name.startswith(last_layer):
            returned_to += others  # gathered twice
        sent += size / len(holders) * (others + returned_to)
    return sent + 2 * shared * (num_ranks - 1) / num_ranks
