"""From a live model and the config block to its plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

from torch import nn

from sdp_deepspeed.architectures import Site, constrained_branches, find_sites, unit_costs, units_of_sites
from sdp_deepspeed.config import SubnetworkConfig, resolve
from sdp_deepspeed.layout.segments import TensorInfo
from sdp_deepspeed.plan.placement import Network
from sdp_deepspeed.plan.plan import Plan, make_plan
from sdp_deepspeed.plan.shards import Shards
from sdp_deepspeed.units import check_pieces


def plan_model(
    model: nn.Module,
    block: SubnetworkConfig,
    data_parallel_size: int,
    network: Network | None = None,
    *,
    sites: Sequence[Site] | None = None,
    shards: Shards | None = None,
) -> tuple[Plan, list[str]]:
    """The plan, the same on every rank, and warnings about it.

    Args:
        model: whole, or what a tensor-parallel rank has of it; on the meta device too.
        block: a parsed config block.
        data_parallel_size: D.
        network: nodes of the ranks, for the placement of replicas; None puts all ranks on one node.
        sites: the model's residual branches; None finds them.
        shards: what a tensor-parallel rank has; None if the model is whole.

    Raises:
        ValueError: a block, or a plan that it names, which does not fit the model or the number of ranks.
    """
    layout = resolve(block, data_parallel_size)
    sites = find_sites(model) if sites is None else sites
    shards = shards or Shards(0, 1, {})
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
        dense_units = [shards.dense_unit(unit) for unit in units]
        plan = make_plan(dense_units, unit_costs(model, units), layout, block, data_parallel_size, branches)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes |= {name: division.shape for name, division in shards.divisions.items()}
    check_pieces(plan.units, lambda piece: shapes.get(piece.parameter))
    local = shards.local_plan(plan)
    if layout.num_replicas > 1:
        network = network or Network((0,) * data_parallel_size)
        plan = plan.place(*_trainable_elements(model, local), network, block.placement)
    return plan, [str(warning.message) for warning in caught]


def _trainable_elements(model: nn.Module, plan: Plan) -> tuple[list[int], int]:
    """Of each unit, and of what is shared."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
    elements = [
        sum(piece.num_elements(shapes[piece.parameter]) for piece in unit.pieces if piece.parameter in shapes)
        for unit in plan.units
    ]
    return elements, sum(map(prod, shapes.values())) - sum(elements)


def dense_tensors(model: nn.Module) -> list[TensorInfo]:
    """Shapes, dtypes and trainability of a whole model's parameters, in model order."""
    return [
        TensorInfo(name, tuple(parameter.shape), parameter.dtype, trainable=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    ]
