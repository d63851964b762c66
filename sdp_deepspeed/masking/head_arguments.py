"""Neuron strategy, forward regime: a body with some of the heads selects them from its arguments by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.absent_blocks import around
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward


def select_heads(body: nn.Module, branch: LocatedBranch, heads: Sequence[int]) -> None:
    """Make a body select the held heads from its arguments."""
    replace_forward(body, _run_held_heads, (branch.description, tuple(heads), branch.num_cells))


def _run_held_heads(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    description, held, num_heads = forward.state
    selected = dict(kwargs)
    for name in description.inner.by_head:
        if isinstance(value := kwargs.get(name), torch.Tensor):
            heads = value.unflatten(1, (num_heads, -1))
            selected[name] = torch.cat([heads[:, head] for head in held], 1)
    output = forward.previous(*args, **selected)
    first = output[0] if description.num_outputs > 1 else output
    return around(first, description.num_outputs, description.extra_outputs, kwargs)
