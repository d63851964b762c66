"""Do ranks that must have the same have the same? The plan at start; weights at start and with `check_agreement`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.segments import TensorInfo, pieces_by_tensor
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


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


def run_together(communicator: Communicator, *works: Callable[[], Any]) -> Any:
    """Run works one after the other on every rank; an error of some is raised on all before the next. Returns what the
    last one returns."""
    result = None
    for work in works:
        error: Exception | None = None
        try:
            result = work()
        except Exception as problem:  # of any kind: the others wait for this rank
            error = problem
        communicator.raise_together(error)
    return result


def differing_replicas(tensors: Mapping[str, torch.Tensor], communicator: Communicator) -> str:
    """Names of tensors that are not the same on all ranks of a group, for people; empty if all are. Every rank of the
    group calls it with the same names."""
    every = communicator.gather_objects({name: digest(tensor) for name, tensor in tensors.items()})
    names = [name for name in every[0] if any(own.get(name) != every[0][name] for own in every)]
    return ", ".join(names[:5]) + (f" +{len(names) - 5} more" if len(names) > 5 else "")


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
        more = f" +{len(differing) - 5} more" if len(differing) > 5 else ""
        raise RuntimeError(f"holders do not agree on {', '.join(differing[:5])}{more}: training has diverged")


def _words(piece: Piece) -> str:
    return (
        piece.parameter if piece.dim is None else f"{piece.parameter}[dim {piece.dim}, {piece.start}:+{piece.length}]"
    )
