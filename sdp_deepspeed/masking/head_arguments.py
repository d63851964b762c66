"""Neuron strategy, forward regime: a body with some of the heads selects them from its arguments by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.absent_blocks import around
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward


@dataclass(frozen=True)
class HeldHeads:
    """State of the forward of a body with some of the heads.

    Args:
        by_head: keyword arguments with the model's heads along dim 1.
        num_outputs, extra_outputs: see `Branch`.
    """

    heads: tuple[int, ...]
    num_heads: int
    by_head: tuple[str, ...]
    num_outputs: int
    extra_outputs: tuple[int | str, ...]


def select_heads(body: nn.Module, branch: LocatedBranch, heads: Sequence[int]) -> None:
    """Make a body select the held heads from its arguments."""
    description = branch.description
    assert description.inner is not None
    by_head, further = description.inner.by_head, description.extra_outputs
    state = HeldHeads(tuple(heads), branch.num_cells, by_head, description.num_outputs, further)
    replace_forward(body, _run_held_heads, state)


def _run_held_heads(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    state: HeldHeads = forward.state
    selected = dict(kwargs)
    for name in state.by_head:
        if isinstance(value := kwargs.get(name), torch.Tensor):
            heads = value.unflatten(1, (state.num_heads, -1))
            selected[name] = torch.cat([heads[:, head] for head in state.heads], 1)
    output = forward.previous(*args, **selected)
    first = output[0] if state.num_outputs > 1 else output
    return around(first, state.num_outputs, state.extra_outputs, kwargs)
