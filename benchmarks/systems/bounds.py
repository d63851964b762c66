"""The fewest bytes that a rank can send in a step, by the kind of its data parallelism; n ranks.

- DDP and ZeRO-0 to 2: each gradient is averaged and each average, or stepped weight, is back on all ranks:
  (n-1)/n there and as much back. Stock ZeRO-1 and 2 send half as much again, since they all-reduce gradients.
- ZeRO-3 and FSDP2, with the weights of one layer at a time: those of layers are gathered for the forward and for the
  backward pass, and gradients scattered: 3 (n-1)/n. The last layer, and what is in none, is needed last in the forward
  and first in the backward pass: 2 (n-1)/n. Who keeps more layers sends less.
- The method over FSDP2, in the same way: 3 (h-1)/h of each unit with h holders, 2 (h-1)/h of those of the last layer.
- The method over DeepSpeed: a unit with h holders sends (h-1)/h there; back, what a holder owns (1/h) goes to the other
  holders, in the backward regime to all other ranks. What is shared has n holders.

The traffic of scalars (norm, overflow), padding, and what shards round are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from sdp_deepspeed.plan.plan import Plan


def everything_whole(num_parameters: int, num_ranks: int, *, wire: int, weights: int) -> float:
    """Of DDP and ZeRO-0 to 2.

    Args:
        wire: bytes of an element of a gradient.
        weights: bytes of an element that comes back.
    """
    return num_parameters * (num_ranks - 1) / num_ranks * (wire + weights)


def weights_sharded(twice: int, once: int, num_ranks: int, *, wire: int, weights: int) -> float:
    """Of ZeRO-3 and FSDP2.

    Args:
        twice: parameters that must be gathered twice: of all layers but the last.
        once: all others.
    """
    sent = twice * (wire + 2 * weights) + once * (wire + weights)
    return sent * (num_ranks - 1) / num_ranks


def of_plan(plan: Plan, shapes: Mapping[str, tuple[int, ...]], rank: int, *, wire: int, weights: int) -> float:
    """Of the method over DeepSpeed on one rank.

    Args:
        shapes: of the dense model's parameters.
    """
    num_ranks = len(plan.subnetwork_of_rank)
    shared, sent = sum(prod(shape) for shape in shapes.values()), 0.0
    for _, size, holders in _parameters(plan, shapes):
        shared -= size
        if rank in holders:
            receivers = (num_ranks if plan.regime == "backward" else len(holders)) - 1
            sent += size / len(holders) * ((len(holders) - 1) * wire + receivers * weights)
    return sent + shared * (num_ranks - 1) / num_ranks * (wire + weights)


def of_sharded_plan(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]], rank: int, *, last: str, wire: int, weights: int
) -> float:
    """Of the method over FSDP2 on one rank.

    Args:
        shapes: of the dense model's parameters.
        last: what names of the last layer's parameters begin with.
    """
    num_ranks = len(plan.subnetwork_of_rank)
    shared, sent = sum(prod(shape) for shape in shapes.values()), 0.0
    for name, size, holders in _parameters(plan, shapes):
        shared -= size
        if rank in holders:
            gatherings = 1 if name.startswith(last) else 2
            sent += size * (len(holders) - 1) / len(holders) * (wire + gatherings * weights)
    return sent + shared * (num_ranks - 1) / num_ranks * (wire + weights)


def _parameters(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Of each piece of a parameter that is in a unit: the parameter's name, its elements, the ranks that hold it."""
    for number, unit in enumerate(plan.units):
        for piece in unit.pieces:
            if piece.kind == "parameter":
                yield piece.parameter, piece.num_elements(shapes[piece.parameter]), tuple(plan.ranks_of(number))
