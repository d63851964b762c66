"""Optimizer state in checkpoints: moments, and values other than tensors (step counts, options of param groups)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from sdp_deepspeed.checkpoint.rank_state import WEIGHT, RankState

logger = logging.getLogger("sdp_deepspeed")

NUMBER = "sdp_group"  # key of param groups that the FSDP2 host has split: index of the user's group
# Optimizers with the same state per element, which can load each other's state.
_ALIKE = {
    "AdamW": "Adam",
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "DeepSpeedCPUAdagrad": "Adagrad",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
}
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")  # options that do not change results
# Of local steps in one world, which are gone: with this momentum their checkpoints had the mean of the inner moments.
_OF_LOCAL_STEPS = "outer_momentum"
Moments = dict[torch.Tensor, dict[str, torch.Tensor]]  # by parameter of the optimizer


class GroupFacts(NamedTuple):
    """Facts of a param group.

    Args:
        scalars: optimizer state with a single value, such as step counts: the maximum over the group; None if this rank
            steps nothing of it.
    """

    options: dict[str, Any]
    scalars: dict[str, float] | None


class OptimizerFacts(TypedDict):
    """Optimizer state without tensors, the same on every rank; part of a checkpoint.

    Attributes:
        kind: class of the optimizer, without the implementation.
        groups: number of the param group, by dense name.
        scalars: step counts and the like of each param group.
    """

    kind: str
    groups: dict[str, int]
    options: list[dict[str, Any]]
    scalars: list[dict[str, float]]


def group_facts(state: RankState) -> dict[int, GroupFacts]:
    """Facts of this rank's param groups, by number.

    Raises:
        ValueError: optimizer state that is neither a number nor one value per element.
    """
    optimizer = state.optimizer.optimizer
    result: dict[int, GroupFacts] = {}
    for number, group in zip(state.group_numbers, optimizer.param_groups, strict=True):
        known = result.get(number)
        scalars = dict(known.scalars or {}) if known else {}
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            for key in values.keys() - moment_names(values, parameter):
                value = values[key]
                if torch.is_tensor(value) and value.numel() != 1:
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a parameter of "
                        f"shape {tuple(parameter.shape)}, expected a scalar or one value per element"
                    )
                if value is not None:
                    scalars[key] = max(scalars.get(key, 0), value.item() if torch.is_tensor(value) else value)
        is_stepped = bool(group["params"]) or (known is not None and known.scalars is not None)
        options = {key: value for key, value in group.items() if key not in ("params", NUMBER)}
        result[number] = GroupFacts(options, scalars if is_stepped else None)
    return result


def optimizer_facts(state: RankState, of_ranks: Sequence[Mapping[int, GroupFacts]]) -> OptimizerFacts:
    """Facts of the optimizer, the same on every rank.

    Args:
        of_ranks: `group_facts` of all ranks.
    """
    num_groups = 1 + max((number for of_rank in of_ranks for number in of_rank), default=-1)
    known: list[list[GroupFacts]] = [[] for _ in range(num_groups)]
    for of_rank in of_ranks:
        for number, facts in of_rank.items():
            known[number].append(facts)
    return {
        "kind": _kind(state.optimizer.optimizer),
        "groups": dict(state.optimizer.param_group_of),
        "options": [of_group[0].options for of_group in known],
        "scalars": [next((f.scalars for f in of_group if f.scalars), {}) for of_group in known],
    }


def _kind(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    return _ALIKE.get(name, name)


def moment_names(state: Mapping[str, Any], parameter: torch.Tensor) -> list[str]:
    """Keys of optimizer state with one value per element."""
    return [key for key, value in state.items() if torch.is_tensor(value) and value.shape == parameter.shape]


def new_moments(state: RankState, stored: Mapping[str, Any], facts: OptimizerFacts) -> Moments:
    optimizer = state.optimizer.optimizer
    if facts["kind"] != _kind(optimizer):
        raise ValueError(
            f"the optimizer state in the checkpoint is of {facts['kind']}, the optimizer is {_kind(optimizer)}; "
            "load without optimizer states"
        )
    kinds_of: dict[str, set[str]] = {}
    for kind, _, name in (text.partition("/") for text in stored):
        if kind not in (WEIGHT, _OF_LOCAL_STEPS):
            kinds_of.setdefault(name, set()).add(kind)
    result: Moments = {}
    for name, parameter in _stepped(state):
        kinds = kinds_of.get(name, set())
        if parameter not in result:
            result[parameter] = {
                kind: torch.zeros_like(
                    parameter.detach(),
                    dtype=_dtype_of_moment(optimizer, parameter, stored[f"{kind}/{name}"].properties.dtype),
                )
                for kind in sorted(kinds)
            }
        if kinds != (others := result[parameter].keys()):
            raise ValueError(
                f"the checkpoint has optimizer state {sorted(kinds)} of {name!r}, but {sorted(others)} of others in "
                "its shard; load without optimizer states"
            )
    return result


def _stepped(state: RankState) -> list[tuple[str, torch.Tensor]]:
    """Dense name and parameter of the optimizer of each tensor that this rank steps elements of."""
    return list(dict.fromkeys((box.name, box.tensor) for box in state.boxes() if box.is_stepped))


def _dtype_of_moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, stored: torch.dtype) -> torch.dtype:
    """Dtype of loaded moments: PyTorch's optimizers require the parameter's, which may differ from the stored one."""
    is_torchs = type(optimizer).__module__.startswith("torch.")
    return parameter.dtype if is_torchs and stored.is_floating_point else stored


def restore_optimizer(state: RankState, moments: Moments, facts: OptimizerFacts) -> None:
    """Load moments and step counts, and options of param groups if both runs have the same groups."""
    optimizer = state.optimizer.optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = {parameter: name for name, parameter in _stepped(state)}
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        group = facts["groups"].get(name_of.get(parameter, ""))
        numbers = {} if group is None else facts["scalars"][group]
        values = moments.get(parameter, {})
        if numbers or values:  # before the first step there is none
            states[index] = values | _as_kept(optimizer, numbers)
    groups = optimizer.param_groups
    optimizer.load_state_dict({"state": states, "param_groups": _options(state, facts)})
    for kept, loaded in zip(groups, optimizer.param_groups, strict=True):  # keep keys that the checkpoint lacks
        kept.clear()
        kept.update(loaded)
    optimizer.param_groups = groups
    for parameter, values in moments.items():  # load_state_dict has cast them to the parameter's dtype
        optimizer.state[parameter].update(values)


def _as_kept(optimizer: torch.optim.Optimizer, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Step counts in the optimizer's type: fp32 tensors in PyTorch, integers in DeepSpeed. Muon has none; those of the
    parameters that it leaves to an Adam are that Adam's."""
    home = type(getattr(optimizer, "aux_optimizer", None) or optimizer).__module__
    if home.startswith("torch."):
        return {key: torch.tensor(value, dtype=torch.float32, device="cpu") for key, value in numbers.items()}
    return {key: int(value) for key, value in numbers.items()} if home.startswith("deepspeed") else dict(numbers)


def _options(state: RankState, facts: OptimizerFacts) -> list[dict[str, Any]]:
    """Param groups for `load_state_dict`, with the checkpoint's options that this optimizer has, if both runs have the
    same groups."""
    here, stored = state.optimizer.optimizer.param_groups, facts["options"]
    groups, first = state.optimizer.param_group_of, 0
    pairs = {(groups[name], facts["groups"][name]) for name in groups.keys() & facts["groups"].keys()}
    stored_of = dict(pairs)
    num_groups = 1 + max([*groups.values(), *state.group_numbers], default=-1)
    is_alike = len(pairs) == len(stored_of) == len({*stored_of.values()}) and len(stored) == num_groups
    if not is_alike and dist.get_rank() == 0:
        logger.warning("param groups differ from the checkpoint's: learning rates and other options are not loaded")
    result = []
    for number, group in zip(state.group_numbers, here, strict=True):
        options = dict(group)
        if is_alike:
            taken = (options.keys() | {"initial_lr"}) - {"params", *_IMPLEMENTATION}
            of_checkpoint = stored[stored_of.get(number, number)]
            options |= {key: value for key, value in of_checkpoint.items() if key in taken}
        options["params"] = list(range(first, first + len(group["params"])))
        first += len(group["params"])
        result.append(options)
    return result
