"""Optimizers that update each tensor by itself, but not each element: which param groups need whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import log_dist

from sdp_deepspeed.config import KEY
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.layout.owners import excess, refuse_cut, sole_owners
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.plan.tensors import NOT_OPTIMIZED, TensorInfo
from sdp_deepspeed.support.optimizers import is_known, steps_whole_tensors
from sdp_deepspeed.units import Piece

_STEP = "step"
_RECOMPUTED = ("RMS",)  # of Adafactors, at each step before they use it
_USE_MUON = "use_muon"  # DeepSpeed's, in the options of a param group: Muon steps it, else Adam


def needs_whole(optimizer: torch.optim.Optimizer, *, every_group: bool = False) -> list[bool]:
    """For each param group whether each of its tensors must be stepped by one rank.

    Args:
        every_group: those of an optimizer that nobody knows too.

    Raises:
        ValueError: it clips by a norm of its own, which would be that of what one rank steps.
    """
    by_kind = every_group or steps_whole_tensors(type(optimizer))
    clip = next((options["max_grad_norm"] for options in optimizer.param_groups if options.get("max_grad_norm")), None)
    if by_kind and clip is not None:
        raise ValueError(
            f"optimizer {type(optimizer).__name__!r} has max_grad_norm={clip}: it would clip by a norm of what one "
            "rank steps; set max_grad_norm to 0 and gradient_clipping in DeepSpeed's config instead"
        )
    return [bool(options.get(_USE_MUON, by_kind)) for options in optimizer.param_groups]


def mark_whole(
    tensors: Sequence[TensorInfo], model: RankModel, optimizer: torch.optim.Optimizer, *, every_group: bool
) -> list[TensorInfo]:
    """Say of each tensor whether one rank steps all of it.

    Args:
        tensors: with their param groups.
        every_group: as `needs_whole`.

    Raises:
        ValueError: no rank has all of such a tensor, or Muon is asked to step what is no matrix.
    """
    is_whole = needs_whole(optimizer, every_group=every_group)
    marked = [replace(info, is_whole=info.group != NOT_OPTIMIZED and is_whole[info.group]) for info in tensors]
    whole = [info for info in marked if info.is_whole]
    for index, options in enumerate(optimizer.param_groups):
        own = [info for info in whole if info.group == index]
        where = f"optimizer param group {index} ({type(optimizer).__name__})"
        _refuse_vectors([info for info in own if options.get(_USE_MUON)], where)
        _refuse_divided([info for info in own if model.shards.division_of(Piece(info.name)) is not None], where)
        refuse_cut(own, model.pieces, where)
    return marked


def _refuse_vectors(tensors: Sequence[TensorInfo], where: str) -> None:
    others = [info.name for info in tensors if len(info.shape) not in (2, 3)]
    if others:
        raise ValueError(
            f"{where}: Muon updates matrices, and {quoted(others)} are none; put them into a param group with "
            f"{_USE_MUON}: False"
        )


def _refuse_divided(tensors: Sequence[TensorInfo], where: str) -> None:
    if tensors:
        raise ValueError(
            f"{where}: it updates whole tensors, and {quoted([info.name for info in tensors])} are divided among "
            "tensor-parallel ranks; use an optimizer that updates each element by itself, or no tensor parallelism"
        )


def log_owners(model: RankModel) -> None:
    """On rank 0, how even their work is."""
    owners = sole_owners(model.tensors, model.plan)
    if owners:
        ratio = excess(owners, len(model.plan.subnetwork_of_rank))
        log_dist(
            f"{KEY}: {len(owners)} tensors are stepped as a whole, each by one rank; the one that owns most has "
            f"{ratio:.2f} times the mean",
            ranks=[0],
        )


def check_state(optimizer: torch.optim.Optimizer, groups: Sequence[SteppedGroup], dp_group: Communicator) -> None:
    """After the first step of an optimizer that nobody knows, all ranks look whether a checkpoint can hold its state.

    Raises:
        ValueError: on all ranks, that it cannot; at the first checkpoint hours would be lost.
    """
    if not is_known(type(optimizer)):
        run_on_all_ranks(dp_group, partial(_refuse_state, optimizer, groups))


def _refuse_state(optimizer: torch.optim.Optimizer, groups: Sequence[SteppedGroup]) -> None:
    name = type(optimizer).__name__
    states = [(group, tensor, optimizer.state.get(tensor, {})) for group in groups for tensor in group.tensors]
    items = [(group, tensor, key, value) for group, tensor, state in states for key, value in state.items()]
    others = {key for *_, key, value in items if not (value is None or torch.is_tensor(value) or _is_number(value))}
    if others:
        raise ValueError(
            f"optimizer {name!r} keeps what is neither a tensor nor a number ({quoted(sorted(others))}), so no "
            "checkpoint could hold its state; use another optimizer"
        )
    odd = {key for group, tensor, key, value in items if not group.is_whole and _is_odd(value, tensor)}
    if odd:
        raise ValueError(
            f"optimizer {name!r} keeps state that does not belong to single elements ({quoted(sorted(odd))}), and a "
            f'rank has parts of a tensor, so no checkpoint could hold it; set {KEY}.allow_optimizer to "whole_tensors" '
            "if it updates each tensor by itself"
        )
    for group in groups:
        _refuse_numbers(name, [optimizer.state.get(tensor, {}) for tensor in group.tensors] if group.is_whole else [])


def _refuse_numbers(name: str, states: Sequence[Mapping[str, Any]]) -> None:
    """A checkpoint has one number for a param group: a count, which is the same for all of its tensors."""
    numbers: dict[str, set[float]] = {}
    fractions = set()
    for key, value in (item for state in states for item in state.items() if item[0] not in _RECOMPUTED):
        if _is_number(value) or (torch.is_tensor(value) and value.dim() == 0):
            numbers.setdefault(key, set()).add(float(value))
            if key != _STEP and (isinstance(value, float) or (torch.is_tensor(value) and value.is_floating_point())):
                fractions.add(key)
    own = fractions | {key for key, values in numbers.items() if len(values) > 1}
    if own:
        raise ValueError(
            f"optimizer {name!r} keeps one number for each tensor ({quoted(sorted(own))}), and a checkpoint holds one "
            "for a param group, such as a step count; use an optimizer that keeps it in a tensor of one dimension"
        )


def _is_odd(value: Any, tensor: torch.Tensor) -> bool:
    """Neither a number nor one float for each element."""
    if not torch.is_tensor(value) or (value.shape == tensor.shape and value.is_floating_point()):
        return False
    return value.numel() != 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
