"""Checks before a plan is applied, and in the forward pass of a masked module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.messages import KEY, quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import blocks_of_units, branches_of_units, constrained_branches
from sdp_deepspeed.units import Unit


def check_plan(model: nn.Module, plan: Plan, branches: Sequence[LocatedBranch]) -> None:
    """Raise ValueError for units that are neither whole branches nor neurons or heads of one, and for SyncBatchNorm."""
    blocks_of_units(plan, branches)
    names = branches_of_units(plan.units, branches)
    by_name = {branch.name: branch for branch in branches}
    constrained = {name for name in constrained_branches(plan.units, branches) if name is not None}
    cut: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        if name is not None:
            cut.setdefault(name, []).append(index)
    for name, units in cut.items():
        for index in units:
            _check_cells(plan.units[index], by_name[name])
        without = set(range(plan.num_subnetworks)).difference(*[plan.holders[index] for index in units])
        if without and name in constrained:
            raise ValueError(
                f"plan: subnetwork {min(without)} has no unit of {name!r}; each needs a group of neurons or a head"
            )
    if not plan.is_dense:
        _refuse_synchronized_norms(model, plan)


def _check_cells(unit: Unit, branch: LocatedBranch) -> None:
    output = next(tensor for tensor in branch.cut_tensors if tensor.cut.is_output)
    width = output.size // branch.num_cells
    expected = {
        cell_piece
        for piece in unit.pieces
        if piece.parameter == output.parameter
        for cell_piece in branch.pieces_of_cells(range(piece.start // width, (piece.start + piece.length) // width))
    }
    if differing := sorted({piece.parameter for piece in expected.symmetric_difference(unit.pieces)}):
        raise ValueError(
            f"plan: unit {unit.name!r} takes other neurons or heads of {quoted(differing)} than of {output.parameter!r}"
        )


def _refuse_synchronized_norms(model: nn.Module, plan: Plan) -> None:
    """Raise ValueError for SyncBatchNorm in units: ranks that lack the unit would not take part in its collectives."""
    for index, unit in enumerate(plan.units):
        for name in {piece.parameter.rpartition(".")[0] for piece in unit.pieces}:
            if plan.coverage_of(index) < 1 and isinstance(model.get_submodule(name), nn.SyncBatchNorm):
                raise ValueError(f"{KEY}: {name} is a SyncBatchNorm in the unit {unit.name!r}; use BatchNorm there")


def is_checkpointed() -> bool:
    """Whether the caller runs in an autograd Function, as in reentrant checkpointing, whose first pass has no_grad."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",) and isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def refuse_cache(module: nn.Module, _: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Forward pre-hook that refuses a key/value cache, which would contain only the held heads of held layers.

    Args:
        kwargs: None if another hook of this call has made the module dense and removed this hook.
    """
    is_subnetwork = module.training or torch.is_grad_enabled()
    if is_subnetwork and kwargs is not None and kwargs.get("past_key_values") is not None:
        raise RuntimeError("past_key_values: a subnetwork cannot use a cache; generate from the dense model (dense())")
