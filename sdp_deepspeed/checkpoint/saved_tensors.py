"""The tensors that a rank saves to a checkpoint and loads from it, as boxes of the dense model.

Keys are `weight/NAME` (fp32 masters of trained parameters; frozen parameters and buffers in their own dtype) and
`MOMENT/NAME` for each moment of the optimizer, such as `exp_avg/NAME`. Low-precision weights are rounded masters and
are not stored. Each element is written by one rank: trained parameters by the owner, other tensors by their first
holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sdp_deepspeed.checkpoint.dcp_planners import State, add_box
from sdp_deepspeed.checkpoint.optimizer_state import Moments, OptimizerFacts, moment_names, new_moments
from sdp_deepspeed.checkpoint.rank_state import WEIGHT, RankState
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.boxes import Box
from sdp_deepspeed.plan.tensors import persistent_buffers

# ---- save -----------------------------------------------------------------------------------------------------------


def written_state(state: RankState, *, exclude_frozen: bool = False) -> State:
    """Boxes of live tensors that this rank saves."""
    result: State = {}
    for box in state.boxes():
        is_left_out = exclude_frozen and not state.mask.trainable.get(box.name, True)
        if box.is_written and state.writes(box.name) and not is_left_out:
            _add(result, state, WEIGHT, box, box.tensor)
            moments = state.optimizer.optimizer.state.get(box.tensor, {}) if box.is_stepped else {}
            for kind in moment_names(moments, box.tensor):
                _add(result, state, kind, box, moments[kind])
    return result


def _add(result: State, state: RankState, kind: str, box: Box, tensor: torch.Tensor) -> None:
    """Add the elements of a box in its tensor, or in a moment of that."""
    add_box(result, f"{kind}/{box.name}", state.shape(box.name), state.offsets(box), box.view(tensor))


# ---- load -----------------------------------------------------------------------------------------------------------


def make_targets(
    state: RankState, stored: Mapping[str, Any], facts: OptimizerFacts | None, *, strict: bool = True
) -> tuple[State, Moments | None]:
    """Find the destinations on this rank: what it steps, and other tensors it stores.

    Args:
        stored: DCP's metadata of each stored tensor, by key.
        facts: of the saved optimizer; None keeps the optimizer's state.

    Returns:
        Boxes of live weights and of new moments; these moments by parameter of the optimizer, None without facts.

    Raises:
        ValueError: the checkpoint is of a different model or optimizer. Nothing has been changed.
    """
    _check_names(state, stored, strict=strict)
    boxes: State = {}
    moments = None if facts is None else new_moments(state, stored, facts)
    for box in state.boxes():
        _add(boxes, state, WEIGHT, box, box.tensor)
        for kind, tensor in (moments or {}).get(box.tensor, {}).items():
            _add(boxes, state, kind, box, tensor)
    return {key: wanted for key, wanted in boxes.items() if key in stored}, moments


def _check_names(state: RankState, stored: Mapping[str, Any], *, strict: bool) -> None:
    mask = state.mask
    tensors = mask.parameters | {n: mask.buffers[n] for n in persistent_buffers(state.model) if n in mask.buffers}
    key_of = {name: f"{WEIGHT}/{name}" for name in tensors if torch.Size(state.shape(name)).numel()}
    names = {key for key in stored if key.startswith(f"{WEIGHT}/")}
    missing = sorted({*key_of.values()} - names)
    unknown = sorted(names - {*key_of.values()})
    if strict and (missing or unknown):
        raise ValueError(
            f"checkpoint of another model: it lacks {len(missing)} tensors ({quoted(missing)}), and "
            f"{len(unknown)} of its tensors are not in the model ({quoted(unknown)})"
        )
    for name, info in ((name, stored[key]) for name, key in key_of.items() if key in stored):
        shape, dtype = tuple(info.size), info.properties.dtype
        if shape != state.shape(name):
            raise ValueError(
                f"checkpoint of another model: {name!r} has shape {shape}, but {state.shape(name)} in the model"
            )
        if tensors[name].is_floating_point() and not dtype.is_floating_point:
            raise ValueError(
                f"checkpoint of another model: {name!r} has {dtype}, but {tensors[name].dtype} in the model"
            )
