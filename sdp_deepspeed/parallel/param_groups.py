"""Param groups of a client's optimizer: the tensors that it trains, and their replacement by shards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.parallel.consistency import gather_objects, refuse_difference, run_on_all_ranks

if TYPE_CHECKING:
    from sdp_deepspeed.masking.mask import Mask


def param_group_indices(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], trainable: Mapping[str, bool]
) -> dict[str, int]:
    """Param group index of each tensor that an optimizer trains, by dense name. The caller compares it across ranks.

    Args:
        optimizer: optimizer of the model's Parameters, not stepped yet. Parameters in no group are not trained.
        parameters: parameters of the model, by dense name; masked or not.
        trainable: whether the user left a parameter trainable, by dense name. Parameters that only the mask froze are
            trained.

    Raises:
        ValueError: the optimizer was stepped before, or has a parameter that is not the model's.
    """
    if any(_was_stepped(state) for state in optimizer.state.values()):
        raise ValueError(
            f"{type(optimizer).__name__} already holds state of earlier steps, for whole parameters; pass a new "
            "optimizer, and load a checkpoint afterwards"
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    indices: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"optimizer: param group {index} has a parameter of shape {tuple(parameter.shape)} that the model "
                    "does not have; build the optimizer from this model's parameters"
                )
            indices[names[id(parameter)]] = index
    return {name: indices[name] for name in parameters if name in indices and trainable[name]}


def agreed_param_groups(
    optimizer: torch.optim.Optimizer, mask: Mask, frozen_before: Collection[str], control: dist.ProcessGroup
) -> dict[str, int]:
    """Param group index of each trained tensor, by dense name, the same on all ranks. Collective.

    Args:
        frozen_before: names of parameters that an earlier engine's mask had frozen on this rank. An optimizer that was
            built meanwhile lacks them; other ranks have them.

    Raises:
        ValueError: as `param_group_indices`, on all ranks.
        RuntimeError: on all ranks, if param groups differ.
    """
    indices = run_on_all_ranks(lambda: param_group_indices(optimizer, mask.parameters, mask.trainable), control)
    for others in gather_objects(indices, control):
        for name, index in others.items():
            if name in frozen_before:
                indices[name] = index
    indices = {name: indices[name] for name in mask.parameters if name in indices}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    facts = [f"{type(optimizer).__name__} {options}", *(f"{item}" for item in indices.items())]
    refuse_difference("param groups", dict(enumerate(gather_objects(facts, control))))
    return indices


def _was_stepped(state: Mapping[str, Any]) -> bool:
    """Whether the state is of an earlier step. Adagrad has state with step 0 at construction."""
    return bool(state) and float(state.get("step", 1)) > 0


def replace_parameters(optimizer: torch.optim.Optimizer, shards: Sequence[Sequence[nn.Parameter]]) -> None:
    """Replace the parameters of an optimizer by shards; groups, including empty ones, and their options are kept.

    State that exists at construction (Adagrad) has one value for all elements: each shard gets that of the first
    parameter of its group.
    """
    states = dict(optimizer.state)
    optimizer.state.clear()
    for group, of_group in zip(optimizer.param_groups, shards, strict=True):
        initial: Mapping[str, Any] = next(
            (states[p] for p in group["params"] if states.get(p) and _has_values(states[p])), {}
        )
        group["params"] = list(of_group)
        if initial:
            for shard in of_group:
                optimizer.state[shard] = {key: _initial_value(value, shard) for key, value in initial.items()}


def _has_values(state: Mapping[str, Any]) -> bool:
    """Whether state has elements; an earlier mask may have emptied parameters before the optimizer was built."""
    return all(value.numel() for value in state.values() if torch.is_tensor(value))


def _initial_value(value: Any, shard: torch.Tensor) -> Any:
    if not torch.is_tensor(value):
        return value
    return torch.full_like(shard, value.flatten()[0].item()) if value.dim() else value.clone()


def prefer_fused(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Use the fused kernels of PyTorch's Adam and AdamW, which are three times as fast on a CPU. Param groups for which
    the user chose a kernel are unchanged. Returns the other groups."""
    chosen = []
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        for group in optimizer.param_groups:
            is_open = group["fused"] is None and group["foreach"] is None
            if is_open and not (group["capturable"] or group["differentiable"]):
                group["fused"] = all(shard.device.type in ("cpu", "cuda") for shard in group["params"])
                chosen.append(group)
    return chosen
