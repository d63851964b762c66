"""`lr_by_coverage`: the learning rate of a unit's elements, by the share of subnetworks that hold it.

A unit of p_u among k subnetworks learns at f(p_u / k) times the rate of its param group; what all hold, shared
parameters too, at f(1) = 1 times. An optimizer sees param groups in parts of one factor each, for as long as a step
takes: schedules, monitors and users see their own, at the rate that they gave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from sdp_deepspeed.config import KEY, LearningRateRule
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.optimizer.stepped_group import SteppedGroup
from sdp_deepspeed.support.optimizers import bounds_own_steps, is_known

Options = dict[str, Any]  # of a param group, or of a part of one
_PARTS_OWN = ("params", "lr")


def rate_factor(rule: LearningRateRule, coverage: float) -> float:
    """What the learning rate of a unit is multiplied by.

    Args:
        coverage: p_u / k, which is also the share of the data-parallel ranks that hold the unit.
    """
    return {"none": 1.0, "sqrt": coverage**0.5, "linear": coverage}[rule]


def refuse_rates(optimizer: torch.optim.Optimizer, rule: LearningRateRule) -> None:
    """
    Raises:
        ValueError: the rule has nothing to multiply: a param group has no learning rate that decides the step.
    """
    if rule == "none":
        return
    for index, options in enumerate(optimizer.param_groups):
        if problem := _problem(optimizer, options):
            raise ValueError(
                f"{KEY}.lr_by_coverage: got {rule!r}, which multiplies learning rates, but param group {index} of "
                f"optimizer {type(optimizer).__name__!r} {problem}; give the group an lr that is a number and decides "
                f'the step, or set {KEY}.lr_by_coverage to "none"'
            )


def _problem(optimizer: torch.optim.Optimizer, options: Options) -> str | None:
    """Why the learning rate of a param group is of no use, None if it is."""
    lr = options.get("lr")
    is_number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    if not is_number and not (torch.is_tensor(lr) and lr.numel() == 1):
        return f"has lr={lr!r}"
    if options.get("relative_step"):
        return "has relative_step=True, so that it chooses its steps by itself"
    if bounds_own_steps(type(optimizer)):
        return "takes its lr only as a bound of steps that it chooses by itself"
    return None


@contextmanager
def rates_by_coverage(
    optimizer: torch.optim.Optimizer, groups: Sequence[SteppedGroup]
) -> Iterator[Sequence[Sequence[Options]]]:
    """Inside, the optimizer has param groups in parts at their learning rates; afterward the very same groups as
    before, with what it wrote into their parts. All of them as they are where every factor is 1.

    Args:
        groups: what its param groups step.

    Yields:
        For each param group its parts.
    """
    live, given = optimizer.param_groups, list(optimizer.param_groups)
    parts = [_parts(options, group) for options, group in zip(given, groups, strict=True)]
    live[:] = [part for own in parts for part in own]  # in place: others may have this list (who wraps an optimizer)
    try:
        yield parts
    finally:
        live[:] = given
        for options, own in zip(given, parts, strict=True):
            _take_back(options, own)


def _parts(options: Options, group: SteppedGroup) -> list[Options]:
    tensors: dict[float, list[torch.Tensor]] = {}
    for tensor, factor in zip(group.tensors, group.factors, strict=True):
        tensors.setdefault(factor, []).append(tensor)
    if tensors.keys() <= {1.0}:
        return [options]
    lr = options["lr"]
    return [
        # A number in a tensor (a count, say) may be changed where it is, which must not happen once for each part.
        {key: value.clone() if torch.is_tensor(value) else value for key, value in options.items()}
        | {"params": own, "lr": lr if factor == 1.0 else lr * factor}
        for factor, own in tensors.items()
    ]


def _take_back(options: Options, parts: Sequence[Options]) -> None:
    """Into a param group what the optimizer wrote into its parts; they let go of their tensors, since an optimizer may
    keep them until its next step (DeepSpeed's Muon)."""
    first = parts[0]
    if first is options:
        return
    for key in first.keys() - set(_PARTS_OWN):
        before, value = options.get(key), first[key]
        if torch.is_tensor(before) and torch.is_tensor(value):
            before.copy_(value)
        else:
            options[key] = value
    for part in parts:
        part["params"] = []


def check_parts(optimizer: torch.optim.Optimizer, parts: Sequence[Sequence[Options]], dp_group: Communicator) -> None:
    """After the first step of an optimizer that nobody knows, all ranks look whether parts of a group are alike.

    Raises:
        ValueError: on all ranks, that it keeps numbers of a param group which follow from the learning rate.
    """
    if not is_known(type(optimizer)):
        run_on_all_ranks(dp_group, partial(_refuse_different, optimizer, parts))


def _refuse_different(optimizer: torch.optim.Optimizer, parts: Sequence[Sequence[Options]]) -> None:
    different = {
        key
        for first, *others in parts
        for other in others
        for key in (first.keys() | other.keys()) - set(_PARTS_OWN)
        if not _is_same(first.get(key), other.get(key))
    }
    if different:
        raise ValueError(
            f"optimizer {type(optimizer).__name__!r} keeps numbers of a param group that follow from its learning rate "
            f"({quoted(sorted(different))}), and {KEY}.lr_by_coverage gives parts of a group rates of their own; set "
            'it to "none", or use another optimizer'
        )


def _is_same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) or torch.is_tensor(other):
        return torch.is_tensor(one) and torch.is_tensor(other) and torch.equal(one, other)
    return one is other or bool(one == other)
