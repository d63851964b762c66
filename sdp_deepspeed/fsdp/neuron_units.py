"""Neuron units as FSDP2 takes them: pieces of branches, each with the same holders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.fsdp.pieces import HeldTensor, ShardedUnit
from sdp_deepspeed.layout.rank_model import RankModel


def neuron_units(
    module: nn.Module, model: RankModel, branches: Sequence[LocatedBranch], split: Sequence[SplitBranch]
) -> dict[str, list[ShardedUnit]]:
    """By branch what FSDP2 gathers together: its pieces in the order in which they run; or all of its body, where every
    rank holds all neurons or heads. The same on every rank, but for what is of this rank.

    Args:
        split: these branches are split already.
    """
    pieces = {part.name: list(_pieces(part)) for part in split}
    names = {name for name in branches_of_units(model.plan.units, branches) if name is not None}
    whole = {branch.name: [_whole(module, model, branch)] for branch in branches if branch.name in names - {*pieces}}
    return pieces | whole


def in_model_order(
    branches: Sequence[LocatedBranch], blocks: Sequence[ShardedUnit], neurons: dict[str, list[ShardedUnit]]
) -> list[ShardedUnit]:
    """All units in the order in which they run; a block of several branches where its first one is."""
    by_first = {unit.ends[0]: [unit] for unit in blocks}
    lists = [neurons.get(branch.name) or by_first.get(branch.modules[0], []) for branch in branches]
    return [unit for units in lists for unit in units]


def _pieces(part: SplitBranch) -> Iterator[ShardedUnit]:
    for number, holders in part.table.sets.items():
        name, is_held = part.table.name_of(number), number in part.held
        yield ShardedUnit(
            name,
            holders,
            (part.pieces[number],) if is_held else (),
            tuple(part.table.tensors(number).values()) if is_held else (),
            (name, name),
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
