"""Masks of hand-made plans, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo, named_tensors


def mask_of(
    module: nn.Module,
    branches: Sequence[LocatedBranch],
    tensors: Sequence[TensorInfo],
    plan: Plan,
    rank: int,
    *,
    scales: bool = False,
) -> Mask:
    """A mask that was applied to `module`."""
    mask = Mask(
        module, RankModel(plan, tuple(tensors), PieceViews(named_tensors(module)), rank), branches, scales=scales
    )
    mask.apply()
    return mask
