"""The fewest bytes that a rank can send in a step, by the kind of its data parallelism; n ranks.

- DDP and ZeRO-0 to 2: each gradient is averaged and each average, or stepped weight, is back on all ranks:
  (n-1)/n there and as much back. Stock ZeRO-1 and 2 send half as much again, since they all-reduce gradients.
- ZeRO-3 and FSDP2, with the weights of one layer at a time: those of layers are gathered for the forward and for the
  backward pass, and gradients scattered: 3 (n-1)/n. The last layer, and what is in none, is needed last in the forward
  and first in the backward pass: 2 (n-1)/n. Who keeps more layers sends less.
- The method: a unit with h holders sends (h-1)/h there; back, what a holder owns (1/h) goes to the other holders, in
  the backward regime to all other ranks. What is shared has n holders.

The traffic of scalars (norm, overflow), padding, and what shards round are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """Of the method on one rank.

    Args:
        shapes: of the dense model's parameters.
    """
    num_ranks = len(plan.subnetwork_of_rank)
    shared, sent = sum(prod(shape) for shape in shapes.values()), 0.0
    for number, unit in enumerate(plan.units):
        pieces = [piece for piece in unit.pieces if piece.kind == "parameter"]
        size = sum(piece.num_elements(shapes[piece.parameter]) for piece in pieces)
        shared -= size
        holders = plan.ranks_of(number)
        if rank in holders:
            receivers = (num_ranks if plan.regime == "backward" else len(holders)) - 1
            sent += size / len(holders) * ((len(holders) - 1) * wire + receivers * weights)
    return sent + shared * (num_ranks - 1) / num_ranks * (wire + weights)
