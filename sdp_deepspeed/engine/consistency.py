"""Do ranks that must have the same have the same? The plan at start; weights at start and with `check_agreement`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.replicas import digest
from sdp_deepspeed.layout.segments import TensorInfo, pieces_by_tensor
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece


def check_same_plan(plan: Plan, communicator: Communicator) -> None:
    """The hash, and which rank has which subnetwork: the hash does not cover that. Every rank calls it.

    Raises:
        RuntimeError: on all ranks, naming those whose plan is another.
    """
    plans = communicator.gather_objects((plan.hash, plan.subnetwork_of_rank))
    different = [rank for rank, other in enumerate(plans) if other != plans[0]]
    if different:
        theirs, ours = plans[different[0]], plans[0]
        raise RuntimeError(
            f"ranks {different[:5]} made another plan than rank 0 (hash {theirs[0][:12]}, not {ours[0][:12]}) or placed"
            f" it otherwise (subnetworks of ranks {theirs[1]}, not {ours[1]}): give all ranks the same model, config "
            "and version of sdp_deepspeed"
        )


def check_holders_agree(
    weight: Callable[[Piece], torch.Tensor], tensors: Sequence[TensorInfo], plan: Plan, communicator: Communicator
) -> None:
    """Every data-parallel rank calls it. In the backward regime all ranks store all weights, so all must agree.

    Args:
        weight: view of a piece in the weights that this rank stores.

    Raises:
        RuntimeError: on all ranks, naming the first pieces on which holders differ.
    """
    everyone = tuple(range(communicator.size))
    pieces = [
        (piece, everyone if plan.regime == "backward" else holders)
        for items in pieces_by_tensor(tensors, plan).values()
        for piece, holders in items
    ]
    own = [digest(weight(piece)) if communicator.rank in holders else None for piece, holders in pieces]
    digests = communicator.gather_objects(own)
    differing = [
        f"{_words(piece)} (ranks {list(holders)[:5]})"
        for index, (piece, holders) in enumerate(pieces)
        if len({digests[rank][index] for rank in holders}) > 1
    ]
    if differing:
        raise RuntimeError(f"holders do not agree on {listed(differing)}: training has diverged")


def _words(piece: Piece) -> str:
    return (
        piece.parameter if piece.dim is None else f"{piece.parameter}[dim {piece.dim}, {piece.start}:+{piece.length}]"
    )
