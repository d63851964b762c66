"""The tensors that a rank saves to a checkpoint and loads from it, as boxes of the dense model.

Keys are `weight/NAME` (fp32 masters of trained parameters; frozen parameters and buffers in their own dtype) and
`MOMENT/NAME` for each moment of the optimizer, such as `exp_avg/NAME`. Low-precision weights are rounded masters and
are not stored. Each element is written by one rank: trained parameters by the owner, other tensors by their first
holder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from sdp_deepspeed.checkpoint.planners import State, add_box
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.plan.tensor_parallel import UNDIVIDED, TensorParallelShards
from sdp_deepspeed.units import Piece

logger = logging.getLogger("sdp_deepspeed")

WEIGHT = "weight"
NUMBER = "sdp_group"  # key of param groups that the FSDP2 host has split: index of the user's group
# Optimizers with the same state per element, so that one can load another's.
_ALIKE = {
    "AdamW": "Adam",
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "DeepSpeedCPUAdagrad": "Adagrad",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
}
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")  # options that do not change results
Facts = dict[str, Any]


class Stepped(Protocol):
    """Elements of a slice in a parameter of the optimizer."""

    @property
    def parameter(self) -> torch.nn.Parameter: ...

    @property
    def piece(self) -> Piece: ...

    def boxes(self, tensor: torch.Tensor, *, flat: bool = False) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """See `ShardPart`."""


class Other(NamedTuple):
    """Elements of a slice that the optimizer does not step.

    Args:
        is_written: whether this rank saves them.
        offsets: in the slice.
        values: a view.
    """

    piece: Piece
    is_written: bool
    offsets: tuple[int, ...]
    values: torch.Tensor


class SteppedModel(Protocol):
    """Interface of sharded optimizers (`ShardedOptimizer`, or FSDP2's) that checkpoints use."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def param_groups(self) -> Mapping[str, int]: ...

    def shard_parts(self, *, owned: bool) -> Sequence[Stepped]: ...

    def gather_weights(self) -> None: ...


@dataclass(frozen=True)
class RankState:
    """Model and optimizer state of one rank.

    Args:
        mask: of the model.
        optimizer: the sharded optimizer.
        groups: process groups.
        shards: the part of each dense tensor that this tensor-parallel rank has.
    """

    mask: Mask
    optimizer: SteppedModel
    groups: Groups
    shards: TensorParallelShards = UNDIVIDED

    @property
    def model(self) -> torch.nn.Module:
        """The module, of the class that exports name."""
        return self.mask.model

    @property
    def group_numbers(self) -> list[int]:
        """Number of each param group; with FSDP2 several groups may have the same number."""
        return list(range(len(self.optimizer.optimizer.param_groups)))

    def others(self) -> Iterator[Other]:
        """Yield the parts of untrained parameters and persistent buffers that this rank stores."""
        names = [name for name in self.mask.parameters if name not in self.optimizer.param_groups]
        tensors: dict[str, torch.Tensor] = {name: self.mask.parameters[name] for name in names}
        for name, tensor in (tensors | self.live_buffers()).items():
            for piece, holders in self.mask.pieces_of(name):
                if self.mask.stored(piece):
                    values = _view(self.mask, piece, tensor)
                    yield Other(piece, holders[0] == self.mask.rank, (0,) * values.dim(), values)

    def live_buffers(self) -> dict[str, torch.Tensor]:
        """Current persistent buffers by name; modules may have replaced them."""
        persistent = persistent_buffers(self.mask.model)
        return {name: buffer for name, buffer in self.mask.model.named_buffers() if name in persistent}

    @property
    def layout(self) -> dict[str, Any]:
        """If it is unchanged on load, each rank restores its own random state and buffers."""
        plan = self.mask.plan
        return {
            "plan": plan.hash,
            "subnetwork_of_rank": list(plan.subnetwork_of_rank),
            "ranks": self.groups.ranks,
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor of the dense model."""
        division = self.shards.divisions.get(name)
        return tuple(self.mask.shapes[name] if division is None else division.shape)

    def key(self, kind: str, name: str) -> str:
        """Key of a dense tensor, or of its moment. If tensor-parallel ranks divide it in an unknown way, its flat parts
        are concatenated, and the key contains the number of ranks."""
        return f"{kind}/{name}" if self.is_known(name) else f"{kind}/{name}@{self.shards.size}"

    def is_known(self, name: str) -> bool:
        division = self.shards.divisions.get(name)
        return division is None or division.is_known

    def writes(self, name: str) -> bool:
        """Whether this tensor-parallel rank saves its part; of replicated tensors only the first rank does."""
        return name in self.shards.divisions or self.groups.tensor_parallel_rank == 0

    def offsets(self, piece: Piece) -> list[int]:
        """Offsets of a piece in the dense tensor."""
        division = self.shards.divisions.get(piece.parameter)
        num_dims = len(self.shape(piece.parameter))
        offsets = [piece.start if dim == piece.dim else 0 for dim in range(num_dims)]
        if division is not None:
            offsets[division.dim] += sum(division.lengths[: self.shards.index])
        return offsets


# ---- save -----------------------------------------------------------------------------------------------------------


def written_state(state: RankState, *, exclude_frozen: bool = False) -> State:
    """Boxes of live tensors that this rank saves.

    Args:
        exclude_frozen: whether to leave out parameters that do not require gradients.
    """
    result: State = {}
    for part in state.optimizer.shard_parts(owned=True):
        if state.writes(part.piece.parameter):
            _add_part(result, state, WEIGHT, part, part.parameter)
            own = state.optimizer.optimizer.state.get(part.parameter, {})
            for key in _moments(own, part.parameter):
                _add_part(result, state, key, part, own[key])
    for other in state.others():
        piece, name = other.piece, other.piece.parameter
        is_left_out = exclude_frozen and piece.kind == "parameter" and not state.mask.trainable[name]
        if state.writes(name) and other.is_written and not is_left_out:
            _add_other(result, state, other)
    return result


def _add_other(result: State, state: RankState, other: Other) -> None:
    """Add a box of a weight or a buffer."""
    is_known = state.is_known(other.piece.parameter)
    values, offsets = (other.values, other.offsets) if is_known else (other.values.view(-1), (0,))
    _add(result, state, WEIGHT, other.piece, offsets, values)


def _add_part(result: State, state: RankState, key: str, part: Stepped, tensor: torch.Tensor) -> None:
    """Add the boxes of a stepped parameter, or of its moment."""
    for offsets, values in part.boxes(tensor, flat=not state.is_known(part.piece.parameter)):
        _add(result, state, key, part.piece, offsets, values)


def _add(result: State, state: RankState, key: str, piece: Piece, offsets: Sequence[int], values: torch.Tensor) -> None:
    name, origin = piece.parameter, state.offsets(piece)
    offsets = [a + b for a, b in zip(origin, offsets, strict=True)]
    add_box(result, state.key(key, name), state.shape(name), offsets, values)


def _moments(own: Mapping[str, Any], parameter: torch.Tensor) -> list[str]:
    """Keys of optimizer state with one value per element."""
    return [key for key, value in own.items() if torch.is_tensor(value) and value.shape == parameter.shape]


def _view(mask: Mask, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    """View of a stored piece in the current tensor; modules may have replaced buffers."""
    if tensor.shape == mask.shapes[piece.parameter]:
        return piece.narrow(tensor.detach())
    return mask.view(piece, tensor) if mask.is_held(piece) else mask.view(piece)


def live_buffers(state: RankState) -> dict[str, torch.Tensor]:
    """This rank's persistent buffers, whose values may differ between ranks."""
    others = (other for other in state.others() if other.piece.kind == "buffer")
    return {f"{other.piece.parameter}@{other.piece.start}": other.values for other in others}


def restore_buffers(state: RankState, buffers: Mapping[str, torch.Tensor]) -> None:
    """Restore the result of `live_buffers`."""
    for key, values in live_buffers(state).items():
        values.copy_(buffers[key])


def persistent_buffers(model: torch.nn.Module) -> set[str]:
    """Names of buffers that are in state dicts."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


# ---- optimizer facts other than tensors -----------------------------------------------------------------------------


class GroupFacts(NamedTuple):
    """Facts of a param group.

    Args:
        scalars: optimizer state with a single value, such as step counts: the maximum over the group; None if this rank
            steps nothing of it.
    """

    options: dict[str, Any]
    scalars: dict[str, float] | None


def group_facts(state: RankState) -> dict[int, GroupFacts]:
    """Facts of this rank's param groups, by number.

    Raises:
        ValueError: optimizer state that is neither a number nor one value per element.
    """
    optimizer = state.optimizer.optimizer
    result: dict[int, GroupFacts] = {}
    for number, group in zip(state.group_numbers, optimizer.param_groups, strict=True):
        known = result.get(number)
        found = dict(known.scalars or {}) if known else {}
        for parameter in group["params"]:
            own = optimizer.state.get(parameter, {})
            for key in own.keys() - _moments(own, parameter):
                value = own[key]
                if torch.is_tensor(value) and value.numel() != 1:
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for a parameter of "
                        f"shape {tuple(parameter.shape)}, expected a scalar or one value per element"
                    )
                if value is not None:
                    found[key] = max(found.get(key, 0), value.item() if torch.is_tensor(value) else value)
        is_stepped = bool(group["params"]) or (known is not None and known.scalars is not None)
        options = {key: value for key, value in group.items() if key not in ("params", NUMBER)}
        result[number] = GroupFacts(options, found if is_stepped else None)
    return result


def optimizer_facts(state: RankState, of_ranks: Sequence[Mapping[int, GroupFacts]]) -> Facts:
    """Optimizer state without tensors, the same on every rank: `kind`, `groups` (number by dense name), `options` and
    `scalars` of each group.

    Args:
        of_ranks: `group_facts` of all ranks.
    """
    numbers = range(1 + max((number for own in of_ranks for number in own), default=-1))
    known = [[own[number] for own in of_ranks if number in own] for number in numbers]
    return {
        "kind": _kind(state.optimizer.optimizer),
        "groups": dict(state.optimizer.param_groups),
        "options": [facts[0].options for facts in known],
        "scalars": [next((f.scalars for f in facts if f.scalars is not None), {}) for facts in known],
    }


def _kind(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    return _ALIKE.get(name, name)


# ---- load -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """Destinations of stored tensors on this rank.

    Args:
        boxes: of live weights, and of new moments.
        moments: by parameter of the optimizer; None keeps the optimizer's state.
    """

    boxes: State
    moments: dict[torch.nn.Parameter, dict[str, torch.Tensor]] | None


def make_targets(state: RankState, stored: Mapping[str, Any], facts: Facts | None, *, strict: bool = True) -> Targets:
    """Find the destinations on this rank: what it steps (in stage 0 all that it holds), and other tensors it stores.

    Args:
        stored: DCP's metadata of each stored tensor, by key.
        facts: of the saved optimizer; None keeps the optimizer's state.
        strict: whether missing and unexpected tensors are errors.

    Raises:
        ValueError: the checkpoint is of a different model or optimizer. Nothing has been changed.
    """
    _check_names(state, stored, strict=strict)
    boxes: State = {}
    for other in state.others():
        _add_other(boxes, state, other)
    moments = None if facts is None else _new_moments(state, stored, facts)
    for part in state.optimizer.shard_parts(owned=False):
        _add_part(boxes, state, WEIGHT, part, part.parameter)
        for key, flat in (moments or {}).get(part.parameter, {}).items():
            _add_part(boxes, state, key, part, flat)
    return Targets({key: found for key, found in boxes.items() if key in stored}, moments)


def _check_names(state: RankState, stored: Mapping[str, Any], *, strict: bool) -> None:
    mask = state.mask
    tensors = mask.parameters | {n: mask.buffers[n] for n in persistent_buffers(mask.model) if n in mask.buffers}
    key_of = {name: state.key(WEIGHT, name) for name in tensors if torch.Size(state.shape(name)).numel()}
    names = {key for key in stored if key.startswith(f"{WEIGHT}/")}
    missing, unknown = sorted({*key_of.values()} - names), sorted(names - {*key_of.values()})
    if strict and (missing or unknown):
        raise ValueError(
            f"checkpoint of another model: it lacks {len(missing)} tensors ({quoted(missing)}), and "
            f"{len(unknown)} are not in the model ({quoted(unknown)})"
        )
    for name, found in ((name, stored[key]) for name, key in key_of.items() if key in stored):
        if tuple(found.size) != state.shape(name):
            raise ValueError(
                f"checkpoint of another model: {name!r} has shape {tuple(found.size)}, but {state.shape(name)} in the "
                "model"
            )
        if tensors[name].is_floating_point() and not found.properties.dtype.is_floating_point:
            raise ValueError(
                f"checkpoint of another model: {name!r} has {found.properties.dtype}, but {tensors[name].dtype} in the "
                "model"
            )


def _new_moments(
    state: RankState, stored: Mapping[str, Any], facts: Facts
) -> dict[torch.nn.Parameter, dict[str, torch.Tensor]]:
    optimizer = state.optimizer.optimizer
    if facts["kind"] != _kind(optimizer):
        raise ValueError(
            f"the optimizer state in the checkpoint is of {facts['kind']}, the optimizer is {_kind(optimizer)}; "
            "load without optimizer states"
        )
    kinds_of: dict[str, set[str]] = {}
    for kind, _, name in (text.partition("/") for text in stored):
        if kind != WEIGHT:
            kinds_of.setdefault(name, set()).add(kind)
    result: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
    for part in state.optimizer.shard_parts(owned=False):
        name = part.piece.parameter
        kinds = kinds_of.get(state.key("", name)[1:], set())
        if part.parameter not in result:
            result[part.parameter] = {
                kind: torch.zeros_like(
                    part.parameter.detach(),
                    dtype=_dtype_of_moment(optimizer, part.parameter, stored[state.key(kind, name)].properties.dtype),
                )
                for kind in sorted(kinds)
            }
        if kinds != (others := result[part.parameter].keys()):
            raise ValueError(
                f"the checkpoint has optimizer state {sorted(kinds)} of {name!r}, but {sorted(others)} of others in "
                "its shard; load without optimizer states"
            )
    return result


def _dtype_of_moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, stored: torch.dtype) -> torch.dtype:
    """Dtype of loaded moments: PyTorch's optimizers require the parameter's, which may differ from the stored one."""
    is_torchs = type(optimizer).__module__.startswith("torch.")
    return parameter.dtype if is_torchs and stored.is_floating_point else stored


def restore_optimizer(state: RankState, targets: Targets, facts: Facts) -> None:
    """Load moments and step counts, and options of param groups if both runs have the same groups."""
    optimizer = state.optimizer.optimizer
    assert targets.moments is not None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = {part.parameter: part.piece.parameter for part in state.optimizer.shard_parts(owned=False)}
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        group = facts["groups"].get(name_of.get(parameter))
        numbers = {} if group is None else facts["scalars"][group]
        if numbers or targets.moments.get(parameter):
            states[index] = targets.moments.get(parameter, {}) | _as_kept(optimizer, numbers)
    groups = optimizer.param_groups
    optimizer.load_state_dict({"state": states, "param_groups": _options(state, facts)})
    for kept, loaded in zip(groups, optimizer.param_groups, strict=True):  # keep keys that the checkpoint lacks
        kept.clear()
        kept.update(loaded)
    optimizer.param_groups = groups
    for parameter, moments in targets.moments.items():  # load_state_dict has cast them to the parameter's dtype
        optimizer.state[parameter].update(moments)


def _as_kept(optimizer: torch.optim.Optimizer, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Step counts in the optimizer's type: fp32 tensors in PyTorch, integers in DeepSpeed."""
    home = type(optimizer).__module__
    if home.startswith("torch."):
        return {key: torch.tensor(value, dtype=torch.float32, device="cpu") for key, value in numbers.items()}
    return {key: int(value) for key, value in numbers.items()} if home.startswith("deepspeed") else dict(numbers)


def _options(state: RankState, facts: Facts) -> list[dict[str, Any]]:
    """Param groups for `load_state_dict`, with the checkpoint's options that this optimizer has, if both runs have the
    same groups."""
    here, stored = state.optimizer.optimizer.param_groups, facts["options"]
    groups, first = state.optimizer.param_groups, 0
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
            found = stored[stored_of.get(number, number)]
            options |= {key: value for key, value in found.items() if key in taken}
        options["params"] = list(range(first, first + len(group["params"])))
        first += len(group["params"])
        result.append(options)
    return result
