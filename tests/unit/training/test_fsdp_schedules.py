"""Learning rates of `--host fsdp2` beside DeepSpeed's own schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from sdp_deepspeed.training.fsdp_schedules import RateSchedule, rates_of

STEPS = 14


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)


def schedule(kind: str, params: dict[str, Any], optimizer: torch.optim.Optimizer) -> RateSchedule:
    rates = rates_of({"type": kind, "params": params})
    assert rates is not None
    return RateSchedule(optimizer, rates)


@pytest.mark.parametrize("warmup", [{}, {"warmup_num_steps": 4}, {"warmup_num_steps": 1, "warmup_type": "linear"}])
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {}),
        ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_type": "linear"}),
        ("WarmupDecayLR", {"total_num_steps": 9}),
        ("WarmupDecayLR", {"total_num_steps": 2, "warmup_min_lr": 0.1, "warmup_max_lr": 0.2}),
        ("WarmupCosineLR", {"total_num_steps": 9}),
        ("WarmupCosineLR", {"total_num_steps": 20, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}),
    ],
)
def test_each_step_has_the_rate_that_deepspeed_gives_it(
    kind: str, params: dict[str, Any], warmup: dict[str, Any]
) -> None:
    """To the last bit, before the first step and after the end; one goes on with the other's state."""
    params = params | warmup
    optimizers = [sgd(), sgd()]
    ours, theirs = schedule(kind, params, optimizers[0]), getattr(lr_schedules, kind)(optimizers[1], **params)

    def rates() -> list[float]:
        return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    for _ in range(STEPS):
        assert rates()[0] == rates()[1]
        for each in (ours, theirs):
            each.step()
        assert ours.state_dict() == theirs.state_dict()
    later = sgd()
    resumed = schedule(kind, params, later)
    resumed.load_state_dict(theirs.state_dict())
    assert later.param_groups[0]["lr"] == rates()[1]


@pytest.mark.parametrize("section", [{}, {"type": None}])
def test_without_a_schedule_there_is_none(section: dict[str, Any]) -> None:
    assert rates_of(section) is None


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("OneCycle", {}, "scheduler.type: got 'OneCycle', expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR"),
        ("WarmupLR", {"warmup_steps": 4}, "scheduler.params.warmup_steps: .*did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps: got 0, expected a whole number"),
        ("WarmupLR", {"warmup_type": "cosine"}, 'expected "log" or "linear"'),
        ("WarmupLR", {"warmup_min_lr": [0.1]}, r"warmup_min_lr: got \[0.1\], expected a number"),
        ("WarmupDecayLR", {}, "total_num_steps: WarmupDecayLR needs it"),
    ],
)
def test_another_schedule_is_refused(kind: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rates_of({"type": kind, "params": params})
