"""State of optimizers that step whole tensors: as many values as they like for each, such as one for each row.

It is stored under the tensor's name in its own shape, so any layout finds it again: whoever steps the tensor gets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.checkpoint.state.chunks import Chunks, StateDict
from sdp_deepspeed.checkpoint.state.rank_chunks import RankChunks
from sdp_deepspeed.checkpoint.storage.names import MASTER, WEIGHT
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.units import Piece


def whole_state(
    group: SteppedGroup, state: Mapping[Any, Mapping[str, Any]], owned: Collection[Piece], rank_chunks: RankChunks
) -> StateDict:
    """What this rank writes of a group's state.

    Args:
        state: the wrapped optimizer's.
        owned: tensors that this rank owns; at stage 0 it steps others too.
    """
    result: StateDict = {}
    for fragment, tensor in zip(group.fragments, group.tensors, strict=True):
        piece = fragment.piece
        for key, value in state.get(tensor, {}).items() if piece in owned else ():
            if is_tensor_state(value):
                shape = rank_chunks.shape(piece.parameter)
                result |= _chunks(f"{key}/{piece.parameter}", value.detach().contiguous(), tensor, shape)
    return result


def new_whole_state(
    group: SteppedGroup, stored: Mapping[str, Any], moments: Mapping[str, Sequence[str]], rank_chunks: RankChunks
) -> tuple[StateDict, list[dict[str, Any]]]:
    """Where a group's state is loaded to, and the same by tensor.

    Args:
        stored: DCP's metadata of what a checkpoint has, by key.
        moments: the same keys by name of a tensor.
    """
    targets: StateDict = {}
    states: list[dict[str, Any]] = []
    for fragment, tensor in zip(group.fragments, group.tensors, strict=True):
        name, own = fragment.piece.parameter, dict[str, Any]()
        for key in moments.get(name, ()):
            is_like_it = tuple(stored[f"{key}/{name}"].size) == rank_chunks.shape(name)
            shape = tensor.shape if is_like_it else stored[f"{key}/{name}"].size
            own[key] = torch.empty(shape, dtype=stored[f"{key}/{name}"].properties.dtype, device=tensor.device)
            targets |= _chunks(f"{key}/{name}", own[key], tensor, rank_chunks.shape(name))
        states.append(own)
    return targets, states


def is_tensor_state(value: Any) -> bool:
    """Else it is one number."""
    return torch.is_tensor(value) and value.dim() > 0


def moments_by_name(stored: Iterable[str]) -> dict[str, list[str]]:
    """Keys of the optimizer's tensors that a checkpoint has for each of the model's; in one pass, as a mixture may have
    tens of thousands of tensors."""
    found: dict[str, list[str]] = {}
    for key, _, name in (text.partition("/") for text in sorted(stored)):
        if key not in (WEIGHT, MASTER):
            found.setdefault(name, []).append(key)
    return found


def _chunks(key: str, value: torch.Tensor, tensor: torch.Tensor, shape: tuple[int, ...]) -> StateDict:
    """A view of the value, in the dense shape if it is like the tensor."""
    view = value.view(shape) if value.shape == tensor.shape else value
    chunks = Chunks(view.shape, view.dtype)
    chunks.add(Box.whole(view.shape), view)
    return {key: chunks}
