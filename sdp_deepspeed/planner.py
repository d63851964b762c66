"""Compute the plan of a live model from the config block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from logging import Logger
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import CROSS_ATTENTION, LocatedBranch
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.proof import proven_branches, replicated_layers, with_proven_cells
from sdp_deepspeed.messages import KEY, announce
from sdp_deepspeed.plan.assign import MAX_SETS_PER_RANK, assign, subnetwork_of_rank
from sdp_deepspeed.plan.connectivity import num_components
from sdp_deepspeed.plan.coverage import Given, default_subnetworks, describe_holders, holders_of_units, whole_holders
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import (
    constrained_branches,
    layers_of_units,
    uncut_branches,
    unit_costs,
    units_of_branches,
)
from sdp_deepspeed.plan.tensor_parallel_shards import UNDIVIDED, TensorParallelShards
from sdp_deepspeed.plan.tensors import named_tensors
from sdp_deepspeed.units import Subnetworks, Unit, UnitCost, check_pieces


def plan_model(
    model: nn.Module,
    block: SubnetworkConfig,
    data_parallel_size: int,
    *,
    branches: Sequence[LocatedBranch] | None = None,
    shards: TensorParallelShards = UNDIVIDED,
) -> tuple[Plan, list[str]]:
    """Compute the plan, the same on every rank, and warnings about it.

    Args:
        model: whole, or the part of a tensor-parallel rank; may be on the meta device.
        branches: the model's residual branches, with what the strategy cuts. Default: derived and proven here.
        shards: what tensor-parallel ranks have divided.

    Raises:
        ValueError: the block, or its plan file, does not fit the model or the number of ranks.
    """
    if branches is None:
        branches = proven_branches(model, block.strategy)
    if block.plan_path is not None:
        plan = _without_frozen(read_plan(block, data_parallel_size), branches)
    else:
        k = num_subnetworks(block, data_parallel_size)
        units = units_of_branches(
            branches,
            strategy=block.strategy,
            granularity=block.granularity,
            shared=block.shared,
            neuron_groups=block.neuron_groups,
            num_subnetworks=k,
        )
        layers, num_layers = layers_of_units(units, branches)
        names = [unit.name for unit in units]
        numbers = holders_of_units(*_given(block), k, names, layers, num_layers)
        costs = unit_costs(model, units)
        constrained = constrained_branches(units, branches)
        dense = [shards.dense_unit(unit) for unit in units]
        wanted = _crossing(units, branches)
        plan = _make_plan(dense, costs, numbers, block, k, data_parallel_size, constrained, wanted)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for name, tensor in named_tensors(model).items():
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        division = shards.divisions.get(name)
        shapes[kind, name] = tuple(tensor.shape) if division is None else division.shape
    check_pieces(plan.units, lambda piece: shapes.get((piece.kind, piece.parameter)))
    warnings = list[str]()
    if uncut := uncut_branches(branches, plan.strategy):
        reason = uncut[0].uncuttable_reason
        warnings.append(f"{len(uncut)} branches are replicated, such as {uncut[0].name!r}: {reason}")
    return plan, [*warnings, *_warnings(plan), *replicated_layers(model)]


def plan_and_mask(
    model: nn.Module,
    block: SubnetworkConfig,
    data_parallel_size: int,
    rank: int,
    branches: Sequence[LocatedBranch],
    shards: TensorParallelShards = UNDIVIDED,
) -> tuple[Plan, Mask, list[str]]:
    """Compute the plan, the mask of a data-parallel rank, which is not applied, and warnings about the plan.

    Args:
        model, branches, shards: as for `plan_model`; neurons and heads of derived branches are proven here.

    Raises:
        ValueError: the block does not fit the model or the number of ranks.
    """
    branches = with_proven_cells(model, branches, block.strategy)
    plan, warnings = plan_model(model, block, data_parallel_size, branches=branches, shards=shards)
    return plan, Mask(model, shards.local_plan(plan), rank, branches, is_scaled=block.is_scaled), warnings


def announce_plan(model: nn.Module, plan: Plan, mask: Mask, warnings: Sequence[str], logger: Logger) -> None:
    """Log warnings about a plan and print its table; call it on one rank.

    Args:
        model: dense, in the mask's coordinates.
    """
    for warning in warnings:
        logger.warning("%s: %s", KEY, warning)
    announce(f"{KEY}\n{plan.table(unit_costs(model, mask.plan.units))}", logger)


def _crossing(units: Sequence[Unit], branches: Sequence[LocatedBranch]) -> list[int]:
    """Blocks with cross-attention; without any, a subnetwork's loss does not reach the encoder."""
    crossing = {p.parameter for b in branches if b.description.name == CROSS_ATTENTION for p in b.pieces}
    blocks = []
    for index, unit in enumerate(units):
        if any(piece.parameter in crossing and piece.dim is None for piece in unit.pieces):
            blocks.append(index)
    return blocks


def _make_plan(
    units: Sequence[Unit],
    costs: Sequence[UnitCost],
    num_holders: Sequence[int],
    block: SubnetworkConfig,
    k: int,
    data_parallel_size: int,
    branches: Sequence[str | None],
    wanted: Collection[int],
) -> Plan:
    """Compute the plan of units with given numbers of holders.

    Args:
        branches: branch of each unit of heads or neurons, of which every subnetwork needs one; None for blocks.
        wanted: blocks of which every subnetwork gets one if there are enough.

    Raises:
        ValueError: a subnetwork would have no unit, or none of a branch.
    """
    holders = assign(
        costs,
        num_holders,
        k,
        seed=block.seed,
        branches=branches,
        wanted=wanted,
        balance_elements=block.regime == "backward",
    )
    _check_reach(holders, k, "the model", "fewer subnetworks, or finer units")
    for branch in dict.fromkeys(name for name in branches if name is not None):
        of_branch = [subnetworks for subnetworks, name in zip(holders, branches, strict=True) if name == branch]
        _check_reach(of_branch, k, f"branch {branch!r}", 'more neuron_groups, or strategy "block" for that branch type')
    ranks = subnetwork_of_rank(k, data_parallel_size)
    return Plan(block.regime, block.strategy, k, block.seed, tuple(units), holders, ranks)


def _check_reach(holders: Sequence[tuple[int, ...]], k: int, what: str, remedy: str) -> None:
    if len(set().union(*holders)) < k:
        words = describe_holders([*map(len, holders)])
        least = -(-k // max(1, len(holders)))
        raise ValueError(
            f"{what}: {len(holders)} units with {words} cannot give each of {k} subnetworks one; use {least} or more "
            f"holders, {remedy}"
        )


def read_plan(block: SubnetworkConfig, data_parallel_size: int) -> Plan:
    """Read the plan in `assignment`, for this number of ranks.

    Raises:
        ValueError: it cannot be read, contradicts the block, or its k does not divide the number of ranks.
    """
    assert block.plan_path is not None
    plan = Plan.load(block.plan_path)
    k = plan.num_subnetworks
    pairs: dict[str, tuple[Any, Any]] = {
        "regime": (plan.regime, block.regime),
        "strategy": (plan.strategy, block.strategy),
        "subnetworks": (k, k if block.subnetworks == "auto" else num_subnetworks(block, data_parallel_size)),
    }
    given, path = _given(block)
    if given is not None and not isinstance(given, tuple):
        numbers = {len(holders) for holders in plan.holders}
        pairs["holders"] = (numbers.pop() if len(numbers) == 1 else None, whole_holders(given, k, path))
    wrong = [
        f"{name} is {mine!r} in the plan and {asked!r} here" for name, (mine, asked) in pairs.items() if mine != asked
    ]
    if wrong:
        raise ValueError(f"{KEY}.assignment: {block.plan_path!r} contradicts the config: {'; '.join(wrong)}")
    _check_divides(k, data_parallel_size, f"{KEY}.assignment: {block.plan_path!r} has")
    return replace(plan, subnetwork_of_rank=subnetwork_of_rank(k, data_parallel_size))


def _without_frozen(plan: Plan, branches: Sequence[LocatedBranch]) -> Plan:
    """Leave out the pieces of frozen branches; the plan may be of the model before some were frozen."""
    frozen = {piece.parameter for branch in branches if not branch.is_trained for piece in branch.pieces}
    units, holders = list[Unit](), list[Subnetworks]()
    for unit, subnetworks in zip(plan.units, plan.holders, strict=True):
        if pieces := tuple(piece for piece in unit.pieces if piece.parameter not in frozen):
            units.append(replace(unit, pieces=pieces))
            holders.append(subnetworks)
    _check_reach(holders, plan.num_subnetworks, f"{KEY}.assignment: trained branches", "or unfreeze more")
    return replace(plan, units=tuple(units), holders=tuple(holders))


def num_subnetworks(block: SubnetworkConfig, data_parallel_size: int) -> int:
    """k of the block; by default one per rank, or fewer if units would have more than eight holders.

    Raises:
        ValueError: k does not divide the number of ranks.
    """
    if block.subnetworks == "auto":
        max_holders = MAX_SETS_PER_RANK  # a rank is in p holder sets of p holders, or more
        return default_subnetworks(_given(block)[0], data_parallel_size, max_holders)
    _check_divides(block.subnetworks, data_parallel_size, f"{KEY}.subnetworks: got")
    return block.subnetworks


def _check_divides(k: int, num_ranks: int, where: str) -> None:
    if num_ranks % k:
        divisors = ", ".join(str(d) for d in range(1, num_ranks + 1) if num_ranks % d == 0)
        raise ValueError(
            f"{where} {k} subnetworks, which do not divide the {num_ranks} data-parallel ranks; possible: {divisors}"
        )


def _given(block: SubnetworkConfig) -> tuple[Given, str]:
    if block.holders is not None:
        return block.holders, f"{KEY}.holders"
    return block.coverage, f"{KEY}.coverage"  # type: ignore[return-value]  # one of them is set, unless a plan is read


def _warnings(plan: Plan) -> list[str]:
    k, numbers = plan.num_subnetworks, [*map(len, plan.holders)]
    if k == 2 and not plan.is_dense:
        return [
            "2 subnetworks: a unit below coverage 1 is trained by one of them alone, and learns from half of the data; "
            "use at least 4, or coverage 1"
        ]
    if num_components(plan.holders, k) == 1:
        return []
    return [
        f"{len(numbers)} units with {describe_holders(numbers)} do not connect {k} subnetworks (spectral gap 0): some "
        "exchange shared parameters only; raise holders, or use finer units"
    ]
