"""What one rank writes to a checkpoint and reads from it, as boxes of the dense model.

Keys of tensors are `weight/NAME` (the fp32 master of what is trained; a frozen parameter or a buffer in its own dtype)
and `MOMENT/NAME` of each moment of the optimizer, such as `exp_avg/NAME`. Low-precision weights are rounded masters, so
they are not stored. Each element is written by one rank: what is trained by its owner, other tensors by their first
holder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdp_deepspeed.core.checkpoint.boxes import State, add_box, row_major_boxes
from sdp_deepspeed.core.masking import Mask
from sdp_deepspeed.core.parallel.buckets import ShardPart
from sdp_deepspeed.core.parallel.groups import Groups
from sdp_deepspeed.core.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.shards import UNDIVIDED, Shards
from sdp_deepspeed.units import Piece

WEIGHT = "weight"
# Optimizers that keep the same state for an element, so that one goes on with another's.
_ALIKE = {
    "AdamW": "Adam",
    "FusedAdam": "Adam",
    "DeepSpeedCPUAdam": "Adam",
    "DeepSpeedCPUAdagrad": "Adagrad",
    "FusedLion": "Lion",
    "DeepSpeedCPULion": "Lion",
}
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")  # options that change no result
Facts = dict[str, Any]


@dataclass(frozen=True)
class RankState:
    """A model in training, on one rank.

    Args:
        shards: which part of each dense tensor this tensor-parallel rank has.
    """

    mask: Mask
    optimizer: ShardedOptimizer
    groups: Groups
    shards: Shards = UNDIVIDED

    @property
    def layout(self) -> dict[str, Any]:
        """Where this is as it was, each rank goes on with its own random numbers and buffers."""
        plan = self.mask.plan
        return {
            "plan": plan.hash,
            "subnetwork_of_rank": list(plan.subnetwork_of_rank),
            "tensor_parallel": self.shards.size,
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of the dense model."""
        division = self.shards.divisions.get(name)
        return tuple(self.mask.shapes[name] if division is None else division.shape)

    def key(self, kind: str, name: str) -> str:
        """Of a dense tensor, or a moment of it. One that is divided among tensor-parallel ranks nobody knows how, as
        flat parts side by side, is another tensor for each number of ranks."""
        return f"{kind}/{name}" if self.is_known(name) else f"{kind}/{name}@{self.shards.size}"

    def is_known(self, name: str) -> bool:
        division = self.shards.divisions.get(name)
        return division is None or division.is_known

    def writes(self, name: str) -> bool:
        """Whether this tensor-parallel rank writes its part of a tensor; of a replicated one, the first does."""
        return name in self.shards.divisions or self.groups.tensor_parallel_rank == 0

    def offsets(self, piece: Piece) -> list[int]:
        """First index of a piece in the dense tensor."""
        division = self.shards.divisions.get(piece.parameter)
        num_dims = len(self.shape(piece.parameter))
        offsets = [piece.start if dim == piece.dim else 0 for dim in range(num_dims)]
        if division is not None:
            offsets[division.dim] += sum(division.lengths[: self.shards.index])
        return offsets


# ---- what is written ------------------------------------------------------------------------------------------------


def written_state(state: RankState, *, exclude_frozen: bool = False) -> State:
    """Boxes of live tensors that this rank writes.

    Args:
        exclude_frozen: leave out parameters that require no gradients.
    """
    result: State = {}
    for part in state.optimizer.shard_parts(owned=True):
        if state.writes(part.slice.piece.parameter):
            _add_range(result, state, WEIGHT, part, part.parameter)
            own = state.optimizer.optimizer.state.get(part.parameter, {})
            for key in _moments(own, part.parameter):
                _add_range(result, state, key, part, own[key])
    for piece, holders, values in _other_pieces(state):
        name, mask = piece.parameter, state.mask
        is_left_out = exclude_frozen and piece.kind == "parameter" and not mask.trainable[name]
        if state.writes(name) and holders[0] == mask.rank and not is_left_out:
            _add_piece(result, state, piece, values)
    return result


def _add_piece(result: State, state: RankState, piece: Piece, values: torch.Tensor) -> None:
    """Add the box of a piece of a weight or a buffer."""
    name = piece.parameter
    values = values if state.is_known(name) else values.view(-1)
    add_box(result, state.key(WEIGHT, name), state.shape(name), state.offsets(piece), values)


def _add_range(result: State, state: RankState, key: str, part: ShardPart, flat: torch.Tensor) -> None:
    """Add the boxes of a part of a shard, or of a moment of it."""
    name, values = part.slice.piece.parameter, part.of(flat)
    shape, origin, first = state.shape(name), state.offsets(part.slice.piece), 0
    own_shape = part.slice.shape if state.is_known(name) else (part.slice.num_elements,)
    for offsets, sizes in row_major_boxes(own_shape, part.start, part.stop):
        view = values[first : first + torch.Size(sizes).numel()].view(sizes)
        add_box(result, state.key(key, name), shape, [a + b for a, b in zip(origin, offsets, strict=True)], view)
        first += view.numel()


def _moments(own: Mapping[str, Any], parameter: torch.Tensor) -> list[str]:
    """Keys of an optimizer's state that has a value for each element of what it steps."""
    return [key for key, value in own.items() if torch.is_tensor(value) and value.shape == parameter.shape]


def _other_pieces(state: RankState) -> Iterator[tuple[Piece, tuple[int, ...], torch.Tensor]]:
    """Pieces of parameters that the optimizer does not step and of persistent buffers, as far as this rank stores them:
    piece, holders, values."""
    mask = state.mask
    persistent = persistent_buffers(mask.model)
    live: dict[str, torch.Tensor] = {n: p for n, p in mask.parameters.items() if n not in state.optimizer.param_groups}
    live |= {name: buffer for name, buffer in mask.model.named_buffers() if name in persistent}
    pieces = mask.pieces | mask.buffer_pieces
    for name, tensor in live.items():
        for piece, holders in pieces[name]:
            if mask.stored(piece):
                yield piece, holders, _view(mask, piece, tensor)


def _view(mask: Mask, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    """A stored piece in the tensor that the module has now; modules may replace buffers."""
    if tensor.shape == mask.shapes[piece.parameter]:
        return piece.narrow(tensor.detach())
    return mask.view(piece, tensor) if mask.is_held(piece) else mask.view(piece)


def live_buffers(state: RankState) -> dict[str, torch.Tensor]:
    """Pieces of persistent buffers that this rank stores, as they are here: each rank may have seen other data."""
    return {f"{p.parameter}@{p.start}": values for p, _, values in _other_pieces(state) if p.kind == "buffer"}


def restore_buffers(state: RankState, buffers: Mapping[str, torch.Tensor]) -> None:
    """Inverse of `live_buffers`."""
    for key, values in live_buffers(state).items():
        values.copy_(buffers[key])


def persistent_buffers(model: torch.nn.Module) -> set[str]:
    """Names of buffers that state dicts have."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


# ---- the optimizer beside its tensors -------------------------------------------------------------------------------


def scalars(state: RankState) -> list[dict[str, float] | None]:
    """Of each param group, state that is one number: the highest in the group, which is stepped together. None where
    this rank steps nothing of the group.

    Raises:
        ValueError: state that is neither a number nor one for each element.
    """
    optimizer = state.optimizer.optimizer
    result: list[dict[str, float] | None] = []
    for group in optimizer.param_groups:
        found: dict[str, float] = {}
        for parameter in group["params"]:
            own = optimizer.state.get(parameter, {})
            for key in own.keys() - _moments(own, parameter):
                value = own[key]
                if torch.is_tensor(value) and value.numel() != 1:
                    raise ValueError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for "
                        f"{tuple(parameter.shape)}; expected one value for each element, or one for all"
                    )
                if value is not None:
                    found[key] = max(found.get(key, 0), value.item() if torch.is_tensor(value) else value)
        result.append(found if group["params"] else None)
    return result


def optimizer_facts(state: RankState, scalars_of_ranks: Sequence[Sequence[dict[str, float] | None]]) -> Facts:
    """All of the optimizer but its tensors, the same on every rank: `kind`, `groups` (index by dense name), `options`
    and `scalars` of each group."""
    optimizer = state.optimizer.optimizer
    return {
        "kind": _kind(optimizer),
        "groups": dict(state.optimizer.param_groups),
        "options": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scalars": [
            next((known for known in of_group if known is not None), {})
            for of_group in zip(*scalars_of_ranks, strict=True)
        ],
    }


def _kind(optimizer: torch.optim.Optimizer) -> str:
    name = type(optimizer).__name__
    return _ALIKE.get(name, name)


# ---- what is read ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """Where stored tensors go on this rank.

    Args:
        boxes: of live weights, and of new moments.
        moments: by what the optimizer steps; None leaves the optimizer's state as it is.
    """

    boxes: State
    moments: dict[torch.nn.Parameter, dict[str, torch.Tensor]] | None


def make_targets(state: RankState, stored: Mapping[str, Any], facts: Facts | None, *, strict: bool = True) -> Targets:
    """Where this rank reads what it steps (in stage 0 all that it holds), and other tensors that it stores.

    Args:
        stored: DCP's metadata of each stored tensor, by key.
        facts: of the optimizer that wrote it; None leaves the optimizer's state as it is.
        strict: stored tensors must be those of the model, neither fewer nor more; else what is missing stays as it is.

    Raises:
        ValueError: it is of another model or optimizer. Nothing has been changed.
    """
    _check_names(state, stored, strict=strict)
    boxes: State = {}
    for piece, _, values in _other_pieces(state):
        _add_piece(boxes, state, piece, values)
    moments = None if facts is None else _new_moments(state, stored, facts)
    for part in state.optimizer.shard_parts(owned=False):
        _add_range(boxes, state, WEIGHT, part, part.parameter)
        for key, flat in (moments or {}).get(part.parameter, {}).items():
            _add_range(boxes, state, key, part, flat)
    return Targets({key: found for key, found in boxes.items() if key in stored}, moments)


def _check_names(state: RankState, stored: Mapping[str, Any], *, strict: bool) -> None:
    mask = state.mask
    tensors = mask.parameters | {n: mask.buffers[n] for n in persistent_buffers(mask.model) if n in mask.buffers}
    key_of = {name: state.key(WEIGHT, name) for name in tensors if torch.Size(state.shape(name)).numel()}
    names = {key for key in stored if key.startswith(f"{WEIGHT}/")}
    missing, unknown = sorted({*key_of.values()} - names), sorted(names - {*key_of.values()})
    if strict and (missing or unknown):
        raise ValueError(
            f"checkpoint of another model: {len(missing)} tensors are missing in it ({quoted(missing)}), "
            f"{len(unknown)} are not in the model ({quoted(unknown)})"
        )
    for name, found in ((name, stored[key]) for name, key in key_of.items() if key in stored):
        if tuple(found.size) != state.shape(name):
            raise ValueError(
                f"checkpoint of another model: {name!r} has shape {tuple(found.size)} in it and {state.shape(name)} "
                "in the model"
            )
        if tensors[name].is_floating_point() and not found.properties.dtype.is_floating_point:
            raise ValueError(
                f"checkpoint of another model: {name!r} is of {found.properties.dtype} in it and "
                f"{tensors[name].dtype} in the model"
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
        name = part.slice.piece.parameter
        kinds = kinds_of.get(state.key("", name)[1:], set())
        if part.parameter not in result:
            result[part.parameter] = {
                kind: torch.zeros_like(part.parameter.detach(), dtype=stored[state.key(kind, name)].properties.dtype)
                for kind in sorted(kinds)
            }
        if kinds != (others := result[part.parameter].keys()):
            raise ValueError(
                f"the checkpoint has optimizer state {sorted(kinds)} of {name!r} and {sorted(others)} of others that "
                "are stepped with it; load without optimizer states"
            )
    return result


def restore_optimizer(state: RankState, targets: Targets, facts: Facts) -> None:
    """Give the optimizer its new moments, step counts, and options where both runs group parameters alike."""
    optimizer = state.optimizer.optimizer
    assert targets.moments is not None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    name_of = {part.parameter: part.slice.piece.parameter for part in state.optimizer.shard_parts(owned=False)}
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        group = facts["groups"].get(name_of.get(parameter))
        numbers = {} if group is None else facts["scalars"][group]
        if numbers or targets.moments.get(parameter):
            states[index] = targets.moments.get(parameter, {}) | _as_kept(optimizer, numbers)
    groups = optimizer.param_groups
    optimizer.load_state_dict({"state": states, "param_groups": _options(state, facts)})
    for kept, loaded in zip(groups, optimizer.param_groups, strict=True):  # others may have them
        kept.clear()
        kept.update(loaded)
    optimizer.param_groups = groups
    for parameter, moments in targets.moments.items():  # PyTorch gave them the parameter's dtype
        optimizer.state[parameter].update(moments)


def _as_kept(optimizer: torch.optim.Optimizer, numbers: Mapping[str, float]) -> dict[str, Any]:
    """PyTorch's optimizers count in fp32 tensors, DeepSpeed's in integers."""
    home = type(optimizer).__module__
    if home.startswith("torch."):
        return {key: torch.tensor(value, dtype=torch.float32, device="cpu") for key, value in numbers.items()}
    return {key: int(value) for key, value in numbers.items()} if home.startswith("deepspeed") else dict(numbers)


def _options(state: RankState, facts: Facts) -> list[dict[str, Any]]:
    """Param groups for `load_state_dict`: options of the checkpoint, as far as this optimizer has them."""
    here, stored = state.optimizer.optimizer.param_groups, facts["options"]
    known = state.optimizer.param_groups.keys() & facts["groups"].keys()
    is_alike = len(stored) == len(here) and all(
        state.optimizer.param_groups[name] == facts["groups"][name] for name in known
    )
    result, first = [], 0
    for index, group in enumerate(here):
        options = dict(group)
        if is_alike:
            taken = (options.keys() | {"initial_lr"}) - {"params", *_IMPLEMENTATION}
            options |= {key: value for key, value in stored[index].items() if key in taken}
        options["params"] = list(range(first, first + len(group["params"])))
        first += len(group["params"])
        result.append(options)
    return result
