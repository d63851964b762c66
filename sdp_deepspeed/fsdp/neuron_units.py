"""Neuron units as FSDP2 takes them: pieces of branches, each with the same holders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.sharded_model import ShardedUnit
from sdp_deepspeed.fsdp.splittable import check_splittable
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.plan import Plan


def split_branches(module: nn.Module, model: RankModel, branches: Sequence[LocatedBranch]) -> list[SplitBranch]:
    """The branches of which some ranks lack neurons or heads, in the order in which they run; nothing is changed yet.

    Args:
        module: whole.
        model: the plan, and the module's tensors.
        branches: the module's residual branches.

    Raises:
        ValueError: one that cannot be split.
    """
    plan = model.plan
    names = branches_of_units(plan.units, branches)
    is_cut = {name for index, name in enumerate(names) if name is not None and plan.coverage_of(index) < 1}
    cut = [branch for branch in branches if branch.name in is_cut]
    check_splittable(module, cut)
    sets = holder_sets(plan)
    return [SplitBranch(module, model, branch, sets) for branch in cut]


def neuron_units(
    module: nn.Module, model: RankModel, branches: Sequence[LocatedBranch], split: Sequence[SplitBranch]
) -> dict[str, list[ShardedUnit]]:
    """By branch what FSDP2 gathers together: its pieces in the order of the sets of holders; or all of its body, where
    every rank holds all neurons or heads. The same on every rank, but for what is of this rank.

    Args:
        split: these branches are split already.
    """
    pieces = {branch.name: list(_pieces(branch)) for branch in split}
    names = {name for name in branches_of_units(model.plan.units, branches) if name is not None}
    whole = {branch.name: [_whole(module, model, branch)] for branch in branches if branch.name in names - {*pieces}}
    return pieces | whole


def holder_sets(plan: Plan) -> list[tuple[int, ...]]:
    """The distinct sets of ranks that hold a unit, or what is in none."""
    everyone = tuple(range(len(plan.subnetwork_of_rank)))
    return sorted({everyone, *(plan.ranks_of(index) for index in range(len(plan.units)))})


def _pieces(branch: SplitBranch) -> Iterator[ShardedUnit]:
    held = {piece.holders: piece for piece in branch.pieces}
    for index, holders in branch.sets:
        piece = held.get(holders)
        yield ShardedUnit(
            f"{branch.name}.{index}",
            holders,
            (piece.module,) if piece else (),
            piece.tensors if piece else (),
            (branch.body_name, branch.body_name),
        )


def _whole(module: nn.Module, model: RankModel, branch: LocatedBranch) -> ShardedUnit:
    everyone = tuple(range(len(model.plan.subnetwork_of_rank)))
    names = [f"{body}.{name}" for body in branch.bodies for name, _ in module.get_submodule(body).named_parameters()]
    return ShardedUnit(
        branch.name,
        everyone,
        tuple(module.get_submodule(body) for body in branch.bodies),
        tuple(HeldTensor(name, name, None, (), everyone) for name in names),
        (branch.bodies[0], branch.bodies[-1]),
    )
