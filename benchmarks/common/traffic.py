"""What systems send in a step: of the exchange as its plans and routes say, of all others as rings do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.estimate.formulas import sent_per_parameter
from sdp_deepspeed.estimate.precision import Precision
from sdp_deepspeed.layout.buckets import build_buckets, build_segments, default_bucket_elements
from sdp_deepspeed.layout.nodes import Nodes
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
    """What the exchange sends in a step with one micro-step; of the first node.

    Args:
        block: the config's.
    """
    config = parse({KEY: dict(block)})
    assert config is not None
    labels = [rank // ranks_per_node for rank in range(num_ranks)]
    plan, _ = plan_model(model, config, num_ranks)
    tensors = [replace(info, group=0) for info in dense_tensors(model) if info.kind == "parameter"]
    nodes, limit = Nodes.of(labels), default_bucket_elements(tensors, plan)
    segments = build_segments(tensors, plan, max_elements=limit, nodes=nodes)
    buckets = build_buckets(segments, nodes, max_elements=limit)
    sent = {rank: [0, 0] for rank in nodes.ranks[0][:_LOOKED_AT]}  # between nodes, and inside
    calls = [0, 0]
    for rank in sent:
        calls = [0, 0]
        for bucket in buckets:
            for level, route in enumerate(routes_back(bucket, rank, nodes, "holders")):
                there, back = route.received.num_elements, route.sent.num_elements  # gradients go the way backward
                sent[rank][level] += there * precision.wire + back * precision.weights
                calls[level] += 2 * route.is_needed
    between, inside = sum(of[0] for of in sent.values()), max(of[1] for of in sent.values())
    return Traffic(inside, between, calls[1], calls[0])


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
