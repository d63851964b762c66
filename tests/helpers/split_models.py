"""Models whose bodies are split into pieces for FSDP2, in one process and without FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.fsdp.pieces import HeldTensor
from sdp_deepspeed.fsdp.sharded_mask import ShardedMask
from torch import nn

from sdp_deepspeed.architectures import branches_of_units, locate_branches, units_of_branches
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.part import DenseTensors
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


def split_in_place(result: nn.Module, plan: Plan, rank: int, *, scales: bool = False) -> tuple[Any, list[SplitBranch]]:
    """The model itself."""
    model = RankModel(plan, tuple(dense_tensors(result)), PieceViews(named_tensors(result)), rank)
    mask = ShardedMask(result, model, locate_branches(result), scales=scales)
    mask.apply()
    return result, [part for part in mask.parts if isinstance(part, SplitBranch)]


def held_tensors(branches: Sequence[SplitBranch]) -> list[HeldTensor]:
    return [tensor for part in branches for number in part.held for tensor in part.table.tensors(number).values()]


def part_of(dense: torch.Tensor, tensor: HeldTensor) -> torch.Tensor:
    """What a held tensor has of the dense one."""
    if tensor.dim is None:
        return dense
    return torch.cat([dense.narrow(tensor.dim, start, length) for start, length in tensor.intervals], tensor.dim)


def dense_values(part: SplitBranch, dense: nn.Module) -> DenseTensors:
    """What `show` takes, without holders that would send it."""
    by_name = {name: tensor for name, tensor in dense.named_parameters() if name in part.values.dtypes}
    return DenseTensors({}, {part.stand_in_of(name): tensor.detach().clone() for name, tensor in by_name.items()})
