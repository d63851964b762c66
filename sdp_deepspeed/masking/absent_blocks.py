"""Block strategy, forward regime: an absent branch adds zeros to the residual stream.

Only the modules of the branch are changed: the first body returns zeros in the shape of its input, the residual
stream, or the stream if it adds to that itself (BLOOM); its norm, further bodies and `after` return their input. The
layer runs its own forward on ordinary tensors, so compilers, checkpointing and hooks work as usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import LIKE_INPUT, Zeros
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward


@dataclass(frozen=True)
class Absent:
    """State of the forward of an absent module.

    Args:
        num_outputs: number of outputs of the body; 0 for a module that returns its input.
        extra_outputs: keywords or positions of arguments that are returned as further outputs; others are None.
        has_storage: whether the zeros need storage, because the layer writes to them.
        added_to: position or keyword of the argument to which the body adds its output itself.
        zeros: shape of the zeros.
    """

    num_outputs: int
    extra_outputs: tuple[int | str, ...] = ()
    has_storage: bool = False
    added_to: int | str | None = None
    zeros: Zeros = LIKE_INPUT


def skip_branch(model: nn.Module, branch: LocatedBranch) -> Iterator[nn.Module]:
    """Make an absent branch add zeros; yields its modules."""
    description = branch.description
    zeros = description.zeros or (Zeros(description.num_outputs),)
    of_bodies = dict(zip(branch.bodies, zeros, strict=False))
    for name in branch.modules:
        state = Absent(0)
        if returned := of_bodies.get(name):
            extra, added_to = description.extra_outputs, description.added_to
            is_first = name == branch.bodies[0]
            state = Absent(
                returned.num_outputs,
                extra if is_first else (),
                description.is_written,
                added_to if is_first else None,
                returned,
            )
        module = model.get_submodule(name)
        replace_forward(module, _pass_or_zero, state)
        yield module


def _pass_or_zero(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    state: Absent = forward.state
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    x = given[next(iter(given)) if state.zeros.like is None else state.zeros.like]
    if not state.num_outputs:
        return x
    if state.added_to is not None:
        return around(given[state.added_to], state.num_outputs, state.extra_outputs, given)
    shape = [math.prod(x.shape[:-1]), x.shape[-1]] if state.zeros.is_flat else [*x.shape]
    if state.zeros.size is not None:
        shape[state.zeros.dim] = state.zeros.size
    zeros = x.new_zeros(shape) if state.has_storage else x.new_zeros(()).expand(shape)  # one element
    if state.zeros.is_tuple:
        return (zeros,)
    return around(zeros, state.num_outputs, state.extra_outputs, given)


def around(
    output: torch.Tensor, num_outputs: int, extra_outputs: tuple[int | str, ...], given: Mapping[Any, Any]
) -> Any:
    """Outputs of a body: `output`, then the arguments in `extra_outputs` (T5's position bias), else None."""
    if num_outputs == 1:
        return output
    further = [given.get(name) for name in extra_outputs]
    return (output, *further, *[None] * (num_outputs - 1 - len(further)))
