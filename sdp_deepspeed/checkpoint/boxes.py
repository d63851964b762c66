"""The tensors that a rank saves to a checkpoint and loads from it, as boxes of the dense model.

Keys are `weight/NAME` (fp32 masters of trained parameters; frozen parameters and buffers in their own dtype) and
`MOMENT/NAME` for each moment of the optimizer, such as `exp_avg/NAME`. Low-precision weights are rounded masters and
are not stored. Each element is written by one rank: trained parameters by the owner, other tensors by their first
holder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdp_deepspeed.checkpoint.optimizer_state import Facts, Moments, moment_names, new_moments
from sdp_deepspeed.checkpoint.planners import State, add_box
from sdp_deepspeed.checkpoint.rank_state import WEIGHT, RankState, Stepped, UnsteppedBox, persistent_buffers
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.units import Piece

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
            for key in moment_names(own, part.parameter):
                _add_part(result, state, key, part, own[key])
    for other in state.unstepped():
        piece, name = other.piece, other.piece.parameter
        is_left_out = exclude_frozen and piece.kind == "parameter" and not state.mask.trainable[name]
        if state.writes(name) and other.is_written and not is_left_out:
            _add_unstepped(result, state, other)
    return result


def _add_unstepped(result: State, state: RankState, other: UnsteppedBox) -> None:
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


# ---- load -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Targets:
    """Destinations of stored tensors on this rank.

    Args:
        boxes: boxes of live weights, and of new moments.
        moments: moments by parameter of the optimizer; None keeps the optimizer's state.
    """

    boxes: State
    moments: Moments | None


def make_targets(state: RankState, stored: Mapping[str, Any], facts: Facts | None, *, strict: bool = True) -> Targets:
    """Find the destinations on this rank: what it steps, and other tensors it stores.

    Args:
        stored: DCP's metadata of each stored tensor, by key.
        facts: facts of the saved optimizer; None keeps the optimizer's state.
        strict: whether missing and unexpected tensors are errors.

    Raises:
        ValueError: the checkpoint is of a different model or optimizer. Nothing has been changed.
    """
    _check_names(state, stored, strict=strict)
    boxes: State = {}
    for other in state.unstepped():
        _add_unstepped(boxes, state, other)
    moments = None if facts is None else new_moments(state, stored, facts)
    for part in state.optimizer.shard_parts(owned=False):
        _add_part(boxes, state, WEIGHT, part, part.parameter)
        for key, flat in (moments or {}).get(part.parameter, {}).items():
            _add_part(boxes, state, key, part, flat)
    return Targets({key: found for key, found in boxes.items() if key in stored}, moments)


def _check_names(state: RankState, stored: Mapping[str, Any], *, strict: bool) -> None:
    mask = state.mask
    tensors = mask.parameters | {n: mask.buffers[n] for n in persistent_buffers(state.model) if n in mask.buffers}
    key_of = {name: state.key(WEIGHT, name) for name in tensors if torch.Size(state.shape(name)).numel()}
    names = {key for key in stored if key.startswith(f"{WEIGHT}/")}
    missing, unknown = sorted({*key_of.values()} - names), sorted(names - {*key_of.values()})
    if strict and (missing or unknown):
        raise ValueError(
            f"checkpoint of another model: it lacks {len(missing)} tensors ({quoted(missing)}), and "
            f"{len(unknown)} of its tensors are not in the model ({quoted(unknown)})"
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
