"""From a live model and the config block to its plan."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from math import prod

from torch import nn

from sdp_deepspeed.architectures import (
    LocatedBranch,
    constrained_branches,
    layers_of_units,
    locate_branches,
    unit_costs,
    units_of_branches,
)
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.assignment import methods as assignment
from sdp_deepspeed.plan.assignment.graph import incidence, is_connected
from sdp_deepspeed.plan.counts import PlanCounts, resolve
from sdp_deepspeed.plan.holders import holders_of_units, in_words
from sdp_deepspeed.plan.placement import Network, nodes_of_subnetworks
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.shards import UNDIVIDED, Shards
from sdp_deepspeed.plan.weighing import weigh
from sdp_deepspeed.units import Unit, UnitCost, check_pieces

_OTHER_NODES = (
    "the plan {path!r} was made for ranks on other nodes: it trains the same here, but may send more between nodes "
    'than a new plan by assignment "auto"'
)


def plan_model(
    model: nn.Module,
    block: SubnetworkConfig,
    data_parallel_size: int,
    network: Network | None = None,
    *,
    branches: Sequence[LocatedBranch] | None = None,
    shards: Shards | None = None,
) -> tuple[Plan, list[str]]:
    """The plan, the same on every rank, and warnings about it.

    Args:
        model: whole, or what a tensor-parallel rank has of it; on the meta device too.
        block: a parsed config block.
        data_parallel_size: D.
        network: nodes of the ranks, for the placement of replicas and assignment "auto"; None puts all ranks on one.
        branches: the model's residual branches; None finds them.
        shards: what a tensor-parallel rank has; None if the model is whole.

    Raises:
        ValueError: a block, or a plan that it names, which does not fit the model or the number of ranks.
    """
    counts = resolve(block, data_parallel_size)
    branches = locate_branches(model) if branches is None else branches
    shards = shards or UNDIVIDED
    units = units_of_branches(
        branches,
        strategy=block.strategy,
        granularity=block.granularity,
        shared=block.shared,
        neuron_groups=block.neuron_groups,
        num_subnetworks=counts.num_subnetworks,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names, costs = constrained_branches(units, branches), unit_costs(model, units)
        dense_units = [shards.dense_unit(unit) for unit in units]
        layers = layers_of_units(units, branches)
        plan = make_plan(dense_units, costs, counts, block, data_parallel_size, names, layers)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes |= {name: division.shape for name, division in shards.divisions.items()}
    check_pieces(plan.units, lambda piece: shapes.get(piece.parameter))
    messages = [str(warning.message) for warning in caught]
    network = network or Network((0,) * data_parallel_size)
    if counts.num_replicas > 1 or len(set(network.nodes)) > 1:
        elements, num_shared = _trainable_elements(model, shards.local_plan(plan))
        nodes = nodes_of_subnetworks(network, plan.num_subnetworks, block.placement)

        def place(plan: Plan) -> Plan:
            return plan.place(elements, num_shared, network, block.placement)

        plan = place(plan)
        if block.assignment == "auto":
            plan = weigh(plan, costs, names, nodes, place)
        elif plan.node_of_subnetwork not in (None, nodes):
            messages.append(_OTHER_NODES.format(path=block.plan_path))
    return plan, messages


def _trainable_elements(model: nn.Module, plan: Plan) -> tuple[list[int], int]:
    """Of each unit, and of what is shared."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters() if parameter.requires_grad}
    elements = [
        sum(piece.num_elements(shapes[piece.parameter]) for piece in unit.pieces if piece.parameter in shapes)
        for unit in plan.units
    ]
    return elements, sum(map(prod, shapes.values())) - sum(elements)


def make_plan(
    units: Sequence[Unit],
    costs: Sequence[UnitCost],
    counts: PlanCounts,
    config: SubnetworkConfig,
    data_parallel_size: int,
    branches: Sequence[str | None] | None = None,
    layers: tuple[Sequence[int], int] | None = None,
) -> Plan:
    """The plan that the config block asks for, the same on every rank; replicas are neighbors until `Plan.place`.

    Args:
        units: the model's units; a plan given by path brings its own, the caller checks that they fit the model.
        costs: cost of each unit.
        counts: from `counts.resolve`.
        config: the block.
        data_parallel_size: D.
        branches: for each unit the branch of which every subnetwork must keep a unit (heads or neuron groups of one
            layer), None for block units; None if all are block units.
        layers: for each unit the index of its layer, and how many the model has; None puts all into one.

    Raises:
        ValueError: too few units, or too few of a branch, for all subnetworks, or a plan given by path that contradicts
            the config (that each subnetwork has a unit of each branch there is checked with the model).
    """
    k = counts.num_subnetworks
    ranks = tuple(rank * k // data_parallel_size for rank in range(data_parallel_size))
    if config.plan_path is not None:
        plan = dataclasses.replace(Plan.load(config.plan_path), subnetwork_of_rank=ranks)
        _check_agreement(plan, counts, config)
    else:
        p = holders_of_units(config, k, [unit.name for unit in units], *(layers or ([0] * len(units), 1)))
        if config.assignment == "cyclic":
            holders = assignment.cyclic(len(units), num_subnetworks=k, num_holders=p[0], branches=branches)
        else:
            holders = assignment.balanced(costs, num_subnetworks=k, num_holders=p, seed=config.seed, branches=branches)
        _check_numbers(units, holders, p)
        number = p[0] if len({*p}) == 1 else None
        plan = Plan(config.regime, config.strategy, k, number, config.seed, tuple(units), holders, ranks)
    _warn_if_disconnected(plan)
    return plan


def _check_numbers(units: Sequence[Unit], holders: Sequence[Sequence[int]], p: Sequence[int]) -> None:
    """A table knows no rules: only here could a search be caught that gave a unit another p than was asked for."""
    wrong = [
        f"{unit.name!r} has {len(subnetworks)} holders instead of {number}"
        for unit, subnetworks, number in zip(units, holders, p, strict=True)
        if len(subnetworks) != number
    ]
    if wrong:
        raise RuntimeError(f"plan: {listed(wrong)}; an error of sdp_deepspeed, please report it")


def _check_agreement(plan: Plan, counts: PlanCounts, config: SubnetworkConfig) -> None:
    pairs = {
        "regime": (plan.regime, config.regime),
        "strategy": (plan.strategy, config.strategy),
        "subnetworks": (plan.num_subnetworks, counts.num_subnetworks),
        "holders": (plan.num_holders or "not one number", counts.num_holders or "not one number"),
    }
    wrong = [f"{name} is {a!r} in the plan and {b!r} here" for name, (a, b) in pairs.items() if a != b]
    if wrong:
        raise ValueError(
            f"assignment: the plan {config.plan_path!r} contradicts the config: {'; '.join(wrong)}. "
            "Change the config, or make a plan for it"
        )


def _warn_if_disconnected(plan: Plan) -> None:
    k, num_units, numbers = plan.num_subnetworks, len(plan.units), [*map(len, plan.holders)]
    if is_connected(incidence(plan.holders, k)):
        return
    if k == 2:
        warnings.warn(
            "2 subnetworks share no unit below coverage 1 (spectral gap 0): they exchange shared parameters only. That "
            f"suits a trial; to train at coverage {plan.coverage:.4g} take 4 ranks or more, whose subnetworks share "
            "units",
            stacklevel=3,
        )
        return
    finer = ', or use finer units: granularity "sublayer", or for MLPs cut by neurons more neuron_groups' * (
        sum(numbers) > num_units
    )
    warnings.warn(
        f"{num_units} units with {in_words(numbers)} do not connect {k} subnetworks (spectral gap 0): "
        "some of them never exchange anything but shared parameters. "
        f"Connecting them takes {k - 1} or more of holders - 1, added up over units, here {sum(numbers) - num_units}: "
        f"raise holders{finer}",
        stacklevel=3,
    )
