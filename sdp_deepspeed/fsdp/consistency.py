"""Do ranks that must have the same have the same? The plan at start; weights at start and with `check_agreement`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.replicas import digests
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Piece


def check_same_plan(plan: Plan, world: Gatherer) -> None:
    """The hash, and which rank has which subnetwork: the hash does not cover that. Every rank calls it.

    Raises:
        RuntimeError: on all ranks, naming those whose plan is another.
    """
    plans = world.gather_objects((plan.hash, plan.subnetwork_of_rank))
    different = [rank for rank, other in enumerate(plans) if other != plans[0]]
    if different:
        theirs, ours = plans[different[0]], plans[0]
        raise RuntimeError(
            f"rank {listed(different)} made another plan than rank 0 (hash {theirs[0][:12]}, not {ours[0][:12]}) or "
            f"placed it otherwise (subnetworks of ranks {theirs[1]}, not {ours[1]}): give all ranks the same model, "
            "config and version of sdp_deepspeed"
        )


def check_holders_agree(model: RankModel, dp_group: Communicator) -> None:
    """Every data-parallel rank calls it. In the backward regime all ranks store all weights, so all must agree.

    Raises:
        RuntimeError: on all ranks, naming the first pieces on which holders differ.
    """
    pieces = list(model.pieces_with_storing_ranks())
    own = [piece for piece, ranks in pieces if dp_group.rank in ranks]
    found = dict(zip(own, digests(_view(model, piece) for piece in own), strict=True))
    by_set: dict[tuple[int, ...], Any] = {}  # what is sent when all is well does not grow with the number of pieces
    for piece, ranks in pieces:
        by_set.setdefault(ranks, hashlib.sha256()).update(found.get(piece, b""))
    summaries = dp_group.gather_objects([summary.digest()[:16] for summary in by_set.values()])
    if all(len({summaries[rank][index] for rank in ranks}) == 1 for index, ranks in enumerate(by_set)):
        return
    by_rank = dp_group.gather_objects([found.get(piece) for piece, ranks in pieces])
    differing = [
        f"{_words(piece)} (ranks {listed(ranks)})"
        for index, (piece, ranks) in enumerate(pieces)
        if len({by_rank[rank][index] for rank in ranks}) > 1
    ]
    raise RuntimeError(f"holders do not agree on {listed(differing)}: training has diverged")


def _view(model: RankModel, piece: Piece) -> torch.Tensor:
    """With the cut dim outermost, as most ranks that cut the tensor store it."""
    view = model.views.weight_view(piece)
    return view if piece.dim is None else view.movedim(piece.dim, 0)


def _words(piece: Piece) -> str:
    if piece.dim is None:
        return piece.parameter
    return f"{piece.parameter}[dim {piece.dim}, {piece.start}:+{piece.length}]"
