"""From a live model and the config block to its plan."""

from __future__ import annotations

import warnings

from torch import nn

from .architectures import constrained_branches, find_sites, unit_costs, units_of_sites
from .config import SubnetworkConfig, resolve
from .plan import Plan, make_plan
from .segments import TensorInfo
from .units import check_pieces


def plan_model(model: nn.Module, block: SubnetworkConfig, data_parallel_size: int) -> tuple[Plan, list[str]]:
    """The plan, the same on every rank, and warnings about it.

    Args:
        model: whole; on the meta device too.
        block: a parsed config block.
        data_parallel_size: D.

    Raises:
        ValueError: a block, or a plan that it names, which does not fit the model or the number of ranks.
    """
    layout = resolve(block, data_parallel_size)
    sites = find_sites(model)
    units = units_of_sites(
        sites,
        strategy=block.strategy,
        granularity=block.granularity,
        shared=block.shared,
        neuron_groups=block.neuron_groups,
        num_subnetworks=layout.num_subnetworks,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        branches = constrained_branches(units, sites)
        plan = make_plan(units, unit_costs(model, units), layout, block, data_parallel_size, branches)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    check_pieces(
        plan.units, lambda piece: tuple(tensors[piece.parameter].shape) if piece.parameter in tensors else None
    )
    return plan, [str(warning.message) for warning in caught]


def dense_tensors(model: nn.Module) -> list[TensorInfo]:
    """Shapes, dtypes and trainability of a whole model's parameters, in model order."""
    return [
        TensorInfo(name, tuple(parameter.shape), parameter.dtype, trainable=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]
