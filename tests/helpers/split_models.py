"""Models whose bodies are split into pieces for FSDP2, in one process and without FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import branches_of_units, locate_branches, units_of_branches
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.fsdp.neuron_units import split_branches
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors

# Rank 0 holds all of it in several pieces, the others some; some piece is everybody's.
OVERLAPPING = ((0, 1), (0, 2), (0,), (0, 1), (0, 1, 2))


def overlapping_plan(model: nn.Module, strategy: Any = "neuron", **choice: Any) -> Plan:
    """Three workers, of which the first holds everything."""
    branches = locate_branches(model)
    units = units_of_branches(branches, **{"strategy": strategy, "num_subnetworks": 5, **choice})
    names = branches_of_units(units, branches)
    numbers = [names[:index].count(name) for index, name in enumerate(names)]
    holders = [OVERLAPPING[number % len(OVERLAPPING)] for number in numbers]
    counts = {*map(len, holders)}
    num_holders = counts.pop() if len(counts) == 1 else None
    return Plan("forward", strategy, 3, num_holders, 0, tuple(units), tuple(holders), (0, 1, 2))


def split(model: nn.Module, plan: Plan, rank: int) -> tuple[Any, list[SplitBranch]]:
    """A copy of `model` as `rank` has it."""
    return split_in_place(deepcopy(model), plan, rank)


def split_in_place(result: nn.Module, plan: Plan, rank: int) -> tuple[Any, list[SplitBranch]]:
    """The model itself."""
    rank_model = RankModel(plan, tuple(dense_tensors(result)), PieceViews(named_tensors(result)), rank)
    branches = split_branches(result, rank_model, locate_branches(result))
    for branch in branches:
        branch.apply()
    return result, branches


def held_tensors(branches: Sequence[SplitBranch]) -> list[HeldTensor]:
    return [tensor for branch in branches for piece in branch.pieces for tensor in piece.tensors]


def part_of(dense: torch.Tensor, tensor: HeldTensor) -> torch.Tensor:
    """What a held tensor has of the dense one."""
    if tensor.dim is None:
        return dense
    return torch.cat([dense.narrow(tensor.dim, start, length) for start, length in tensor.intervals], tensor.dim)


def by_dense_name(branches: Sequence[SplitBranch], dense: nn.Module) -> Mapping[str, torch.Tensor]:
    """What `show` takes."""
    return {name: dense.get_parameter(name).detach() for branch in branches for name in branch.shapes}
