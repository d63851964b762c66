"""Masks of hand-made plans, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.core.masking import Mask
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo


def mask_of(
    module: nn.Module, branches: Sequence[LocatedBranch], tensors: Sequence[TensorInfo], plan: Plan, rank: int
) -> Mask:
    """A mask that was applied to `module`."""
    mask = Mask(module, plan, rank, branches=branches)
    mask.apply()
    return mask
