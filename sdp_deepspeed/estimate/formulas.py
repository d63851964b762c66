"""Bytes of model state and of traffic per parameter that belongs to a unit, in closed form for any number of ranks.

Shared parameters, padding and what a plan rounds are left out; per_rank.py counts them from a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb

from sdp_deepspeed.estimate.precision import FP32_BYTES, Precision

SHARDED = ("ZeRO-1", "ZeRO-2", "SDP + ZeRO-1", "SDP + ZeRO-2")  # whose optimizer state may be offloaded
_PLAIN_AND_OURS = (("DDP / ZeRO-0", "SDP, stage 0"), ("ZeRO-1", "SDP + ZeRO-1"), ("ZeRO-2", "SDP + ZeRO-2"))  # by stage


def bytes_per_parameter(
    num_ranks: int, coverage: float, precision: Precision, *, regime: str = "forward", offload: bool = False
) -> dict[str, tuple[float, float, float]]:
    """Weights, gradients and optimizer state per parameter that belongs to a unit.

    Replicas of subnetworks change nothing here: n ranks share, whatever the number of subnetworks.

    Args:
        num_ranks: n.
        coverage: C.
        precision: an fp32 master is counted unless the weights are fp32.
        regime: in the "backward" regime every rank has all weights.
        offload: the optimizer's state is in host memory, with a master in any precision; only `SHARDED`.
    """
    n, c = num_ranks, coverage
    w, g, o = precision.weights, precision.gradients, precision.optimizer(offload=offload)
    held = w if regime == "backward" else w * c
    rows = {
        "DDP / ZeRO-0": (w, g, o),
        "ZeRO-1": (w, g, o / n),
        "ZeRO-2": (w, g / n, o / n),
        "ZeRO-3, FSDP": (w / n, g / n, o / n),
        "SDP, stage 0": (held, g * c, o * c),
        "SDP + ZeRO-1": (held, g * c, o / n),
        "SDP + ZeRO-2": (held, FP32_BYTES / n, o / n),  # averages are fp32
        "SDP + FSDP2": (w / n, g / n, o / n),
    }
    if regime == "backward":
        del rows["SDP + FSDP2"]
    return {name: row for name, row in rows.items() if name in SHARDED or not offload}


def sent_per_parameter(
    num_ranks: int, coverage: float, precision: Precision, *, regime: str = "forward", accumulation: int = 1
) -> dict[str, float]:
    """The fewest bytes that a rank can send in one optimizer step, per parameter that belongs to a unit.

    Gradients go to their owners (C (h-1) / h elements, with h holders), and weights return: to the holders in the
    forward regime, in the "backward" regime to all of n ranks ((n-1) / n). Replicas change nothing here either: a
    unit has h = p r = C n holders. Stock ZeRO sends more than this, 3 (n-1) / n elements: it all-reduces gradients.
    ZeRO-3 and FSDP2 gather weights for the forward and again for the backward pass of each micro-step, and average
    gradients there (`set_requires_gradient_sync` is a loop's own).

    Args:
        accumulation: micro-steps; at stages 2 and 3 gradients are sent in each.
        num_ranks, coverage, precision, regime: as in `bytes_per_parameter`.
    """
    num_holders = coverage * num_ranks
    to_all = (num_ranks - 1) / num_ranks
    to_holders = coverage * max(0.0, num_holders - 1) / num_holders
    returned = to_all if regime == "backward" else to_holders
    wire, weights = precision.wire, precision.weights
    sent = {}
    for stage, (plain, ours) in enumerate(_PLAIN_AND_OURS):
        rounds = accumulation if stage == 2 else 1
        sent[plain] = to_all * (wire * rounds + weights)
        sent[ours] = to_holders * wire * rounds + returned * weights
    sent["SDP, stage 0"] = 2 * to_holders * wire + (to_all * weights if regime == "backward" and coverage < 1 else 0)
    per_element = accumulation * (wire + 2 * weights)
    sent["ZeRO-3, FSDP"] = to_all * per_element
    if regime == "forward":
        sent["SDP + FSDP2"] = to_holders * per_element
    return sent


def between_nodes(
    num_ranks: int, coverage: float, ranks_per_node: int, precision: Precision, *, regime: str = "forward"
) -> dict[str, tuple[float, float, float]]:
    """Nodes of a unit's holders, the fewest bytes that all ranks together send between nodes in one optimizer step per
    parameter that belongs to a unit (stage 2: with one micro-step), and the largest spectral gap.

    A unit whose holders are on m of M nodes crosses m - 1 times on its way there, and m - 1 or ("backward" regime)
    M - 1 times on its way back. The gap of M nodes that meet equally often is M (m-1) / (m (M-1)).

    Args:
        num_ranks, coverage, precision, regime: as in `bytes_per_parameter`; each rank has its own subnetwork.
        ranks_per_node: the last node may have fewer.

    Returns:
        For data parallelism, for spread holders, and for the fewest nodes that have room for them.
    """
    num_nodes, num_holders = -(-num_ranks // ranks_per_node), max(1, round(coverage * num_ranks))

    def sent(nodes: float) -> float:
        return (nodes - 1) * precision.wire + ((num_nodes if regime == "backward" else nodes) - 1) * precision.weights

    def bound(count: int, of: int) -> float:
        return 1.0 if of == 1 else of * (count - 1) / (count * (of - 1))

    sizes = [min(ranks_per_node, num_ranks - first) for first in range(0, num_ranks, ranks_per_node)]
    without = sum(comb(num_ranks - size, num_holders) for size in sizes) / comb(num_ranks, num_holders)
    spread, fewest = num_nodes - without, -(-num_holders // ranks_per_node)
    gap = bound(num_holders, num_ranks)
    return {
        "data parallelism": (num_nodes, sent(num_nodes), 1.0),
        "holders anywhere": (spread, sent(spread), gap),
        "holders on the fewest nodes": (fewest, sent(fewest), min(gap, bound(fewest, num_nodes))),
    }


def between_nodes_table(rows: Mapping[str, tuple[float, float, float]], num_nodes: int) -> str:
    """As markdown."""
    lines = [f"| between {num_nodes} nodes | nodes of a unit | bytes per parameter and step, in all | spectral gap |"]
    lines.append("|---|---|---|---|")
    for name, (nodes, sent, gap) in rows.items():
        lines.append(f"| {name} | {nodes:.3g} | {sent:.4g} | at most {gap:.3f} |")
    return "\n".join(lines)


def table(rows: Mapping[str, tuple[float, float, float]], sent: Mapping[str, float], *, offload: bool = False) -> str:
    """Both as markdown; the sum is that of the device's memory."""
    state = "optimizer, host memory" if offload else "optimizer"
    lines = [f"| bytes per parameter | weights | gradients | {state} | sum on device | least sent per step |"]
    lines.append("|---|---|---|---|---|---|")
    for name, (weights, gradients, optimizer) in rows.items():
        total = weights + gradients + (0 if offload else optimizer)
        figures = " | ".join(f"{figure:.4g}" for figure in (weights, gradients, optimizer, total))
        lines.append(f"| {name} | {figures} | {f'{sent[name]:.4g}' if name in sent else ''} |")
    return "\n".join(lines)
