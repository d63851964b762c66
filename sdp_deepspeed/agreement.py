"""Debug switch `check_agreement`: do holders of a unit have the same bits, and all ranks the same shared tensors?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from .communicator import Communicator
from .plan import Plan
from .segments import TensorInfo, pieces_by_tensor
from .units import Piece


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


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
