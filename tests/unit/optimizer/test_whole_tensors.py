"""State that no checkpoint could hold is refused at the first step, and nothing else is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sdp_deepspeed.distributed.agreement import OneRank
from sdp_deepspeed.optimizer.whole_tensors import check_state


class Novel(torch.optim.SGD):
    """An optimizer that nobody knows."""


def check(*states: dict[str, Any], is_whole: bool = True) -> None:
    """Of tensors of one param group."""
    tensors = [nn.Parameter(torch.ones(2, 3)) for _ in states]
    optimizer = Novel(tensors, lr=0.1)
    optimizer.state.update(zip(tensors, states, strict=True))
    group: Any = SimpleNamespace(is_whole=is_whole, tensors=tensors)
    communicator: Any = OneRank()
    check_state(optimizer, [group], communicator)


@pytest.mark.parametrize(
    "values",
    [
        (torch.tensor(0.1), torch.tensor(900.0)),
        (torch.tensor(0.1),),  # a rank may step one tensor of the group, and others have another number
        (0.1, 900.0),
        (3, 4),
    ],
)
def test_a_number_of_each_tensor_is_refused(values: tuple[Any, ...]) -> None:
    """NovoGrad's second moment: a resume would give all tensors the highest."""
    with pytest.raises(ValueError, match=r"'Novel' keeps one number for each tensor \('v'\)"):
        check(*({"step": 1, "exp_avg": torch.zeros(2, 3), "v": value} for value in values))


@pytest.mark.parametrize("step", [1, torch.tensor(1.0)])
def test_counts_and_what_is_computed_anew_are_taken(step: Any) -> None:
    check(
        {"step": step, "k": 1, "RMS": 0.5, "v": torch.zeros(1)}, {"step": step, "k": 1, "RMS": 0.7, "v": torch.ones(1)}
    )


def test_step_counts_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="'step'"):
        check({"step": torch.tensor(1.0)}, {"step": torch.tensor(2.0)})
