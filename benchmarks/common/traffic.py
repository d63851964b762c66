"""What systems send in a step: of the engine as its buckets say, of all others as rings do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.estimate.formulas import sent_per_parameter
from sdp_deepspeed.estimate.per_rank import DEFAULT_BUCKET, buckets_of
from sdp_deepspeed.estimate.precision import Precision
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors

_LOOKED_AT = 8  # ranks of a node; where more are in one domain, nothing leaves it, and these are like the rest


@dataclass(frozen=True)
class Traffic:
    """Of one step.

    Args:
        inside: bytes that the GPU with the most sends inside its node.
        between: bytes that the node with the most sends to others.
        num_inside, num_between: collectives.
    """

    inside: float
    between: float
    num_inside: int
    num_between: int


def exchanged(
    model: torch.nn.Module, block: Mapping[str, Any], num_ranks: int, *, ranks_per_node: int, precision: Precision
) -> Traffic:
    """What the engine sends in a step with one micro-step; of the first node. A ring of a holder set that is on several
    nodes crosses each node's link with what one rank sends.

    Args:
        block: the config's.
    """
    config = parse({KEY: dict(block)})
    assert config is not None
    plan, _ = plan_model(model, config, num_ranks)
    tensors = [replace(info, group=0) for info in dense_tensors(model) if info.kind == "parameter"]
    inside = dict.fromkeys(range(min(ranks_per_node, _LOOKED_AT)), 0.0)
    between, num_inside, num_between = 0.0, 0, 0
    for bucket in buckets_of(plan, tensors, DEFAULT_BUCKET):
        holders = bucket.holders
        here = [rank for rank in holders if rank < ranks_per_node]
        sent = bucket.num_elements * (len(holders) - 1) / len(holders) * (precision.wire + precision.weights)
        if len(holders) > 1 and len(here) < len(holders):
            num_between += 2
            between += sent * bool(here)
        elif len(holders) > 1:
            num_inside += 2
        for rank in inside.keys() & {*here}:
            inside[rank] += sent
    return Traffic(max(inside.values()), between, num_inside, num_between)


def rings(num_parameters: int, num_ranks: int, *, num_layers: int, precision: Precision) -> dict[str, Traffic]:
    """Of the others: a ring that goes once through each node crosses its link with what one rank sends."""
    # gradients there, weights back
    both_ways = sent_per_parameter(num_ranks, 1.0, precision)["ZeRO-1"] * num_parameters
    num_buckets = -(-num_parameters * precision.wire // 2**25)  # of 32 MB
    return {
        "DDP": Traffic(both_ways, both_ways, num_buckets, num_buckets),
        "ZeRO-1, ZeRO-2": Traffic(1.5 * both_ways, 1.5 * both_ways, 2 * num_buckets, 2 * num_buckets),
        "ZeRO-3, FSDP2": Traffic(1.5 * both_ways, 1.5 * both_ways, 3 * num_layers, 3 * num_layers),
    }
