"""Block strategy, forward regime: an absent branch adds zeros to the residual stream.

Only the modules of the branch are changed: the first body returns zeros in the shape of its input, the residual
stream, or the stream if it adds to that itself (BLOOM); its norm, further bodies and `after` return their input. The
layer runs its own forward on ordinary tensors, so compilers, checkpointing and hooks work as usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import Zeros
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward


@dataclass(frozen=True)
class Absent:
    """State of the forward of an absent body.

    Args:
        has_storage: whether the zeros need storage, because the layer writes to them.
        extra_outputs, added_to: see `Branch`.
    """

    zeros: Zeros
    has_storage: bool
    extra_outputs: tuple[int | str, ...] = ()
    added_to: int | str | None = None


def skip_branch(model: nn.Module, branch: LocatedBranch) -> Iterator[nn.Module]:
    """Make an absent branch add zeros; yields its modules."""
    description = branch.description
    zeros = description.zeros or (Zeros(description.num_outputs),)
    of_bodies = dict(zip(branch.bodies, zeros, strict=False))
    for name in branch.modules:
        state = None
        if name in of_bodies:
            state = Absent(of_bodies[name], description.is_written)
            if name == branch.bodies[0]:
                state = replace(state, extra_outputs=description.extra_outputs, added_to=description.added_to)
        module = model.get_submodule(name)
        replace_forward(module, _pass_or_zero, state)
        yield module


def _pass_or_zero(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    state: Absent | None = forward.state
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    if state is None:
        return given[next(iter(given))]
    returned = state.zeros
    if state.added_to is not None:
        return around(given[state.added_to], returned.num_outputs, state.extra_outputs, given)
    x = given[next(iter(given)) if returned.like is None else returned.like]
    shape = [math.prod(x.shape[:-1]), x.shape[-1]] if returned.is_flat else [*x.shape]
    if returned.size is not None:
        shape[returned.dim] = returned.size
    zeros = x.new_zeros(shape) if state.has_storage else x.new_zeros(()).expand(shape)  # one element
    if returned.is_tuple:
        return (zeros,)
    return around(zeros, returned.num_outputs, state.extra_outputs, given)


def around(
    output: torch.Tensor, num_outputs: int, extra_outputs: tuple[int | str, ...], given: Mapping[Any, Any]
) -> Any:
    """Outputs of a body: `output`, then the arguments in `extra_outputs` (T5's position bias), else None."""
    if num_outputs == 1:
        return output
    further = [given.get(name) for name in extra_outputs]
    return (output, *further, *[None] * (num_outputs - 1 - len(further)))
