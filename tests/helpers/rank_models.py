"""Masks and optimizers of hand-made plans, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.param_groups import agree_on_groups
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.nodes import Nodes
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.optimizer.settings import OptimizerSettings
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


def optimizer_of(
    optimizer: torch.optim.Optimizer,
    *,
    parameters: Mapping[str, nn.Parameter],
    tensors: Sequence[TensorInfo],
    plan: Plan,
    dp_group: Communicator,
    settings: OptimizerSettings,
    nodes: Nodes | None = None,
    loss_scaler: LossScalerBase | None = None,
) -> SubnetworkOptimizer:
    """The wrapper of an optimizer whose parameters lie as in the dense model."""
    model = RankModel(plan, tuple(tensors), PieceViews(parameters), dp_group.rank, on_nodes=nodes)
    return wrapped(optimizer, model, dp_group, settings=settings, loss_scaler=loss_scaler)


def wrapped(
    optimizer: torch.optim.Optimizer,
    model: RankModel,
    dp_group: Communicator,
    *,
    settings: OptimizerSettings,
    loss_scaler: LossScalerBase | None = None,
) -> SubnetworkOptimizer:
    """As the engine wraps an optimizer."""
    with_groups = agree_on_groups(optimizer, model, dp_group, settings=settings)
    result = SubnetworkOptimizer(optimizer, with_groups, dp_group, settings=settings, loss_scaler=loss_scaler)
    result.install()
    return result
