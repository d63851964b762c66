"""Which holder steps which whole tensor, where an optimizer does not step each element by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sdp_deepspeed.config import KEY
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Piece


def refuse_cut(
    tensors: Sequence[TensorInfo],
    pieces: Mapping[tuple[str, str], Sequence[tuple[Piece, tuple[int, ...]]]],
    where: str,
) -> None:
    """ValueError, with `where` before it, if the plan cuts one of these, which one rank must step as a whole."""
    cut = [info.name for info in tensors if any(piece.dim is not None for piece, _ in pieces[info.kind, info.name])]
    if cut:
        raise ValueError(
            f"{where}: it updates whole tensors, and {quoted(cut)} are cut into neurons or "
            f'heads that different ranks hold, so that none could; use {KEY}.strategy "block" for them, or a param '
            "group whose optimizer updates each element by itself"
        )


def sole_owners(tensors: Sequence[TensorInfo], plan: Plan) -> dict[Piece, int]:
    """The owner of each tensor that is stepped as a whole; the same on all ranks.

    Largest first, each goes to the holder that has fewest elements so far, so that what ranks own differs by a tensor
    or so where holders allow it. Then single tensors move as long as that makes it more even.

    Args:
        tensors: dense tensors in model order.
    """
    by_name = pieces_by_tensor(tensors, plan)
    holders_of: dict[Piece, tuple[int, ...]] = {}
    sizes: dict[Piece, int] = {}
    for info in tensors:
        if info.is_whole and 0 not in info.shape:
            ((piece, holders),) = by_name[info.kind, info.name]
            holders_of[piece] = holders
            sizes[piece] = piece.num_elements(info.shape)
    loads = [0] * len(plan.subnetwork_of_rank)
    owners: dict[Piece, int] = {}
    for piece in sorted(sizes, key=lambda piece: -sizes[piece]):
        owners[piece] = min(holders_of[piece], key=lambda rank: (loads[rank], rank))
        loads[owners[piece]] += sizes[piece]
    is_moving = True
    while is_moving:  # each move makes the sum of squares smaller, so there is a last one
        is_moving = False
        for piece, size in sizes.items():
            owner, best = owners[piece], min(holders_of[piece], key=lambda rank: (loads[rank], rank))
            if loads[best] + size < loads[owner]:
                owners[piece], is_moving = best, True
                loads[owner] -= size
                loads[best] += size
    return owners


def excess(owners: Mapping[Piece, int], num_ranks: int) -> float:
    """Elements of the rank that owns most, divided by the mean over all ranks."""
    loads = [0] * num_ranks
    for piece, owner in owners.items():
        loads[owner] += piece.length  # of a whole tensor its number of elements
    return max(loads) * num_ranks / sum(loads)
