"""Moments of the inner optimizers, which a team that comes back copies from the others, by files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

from benchmarks.common.held_bytes import inner_optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_moments(engine: Any, folder: Path) -> None:
    """Write the moments of this team's parameters, if another one took weights over at the last meeting. Every rank of
    the team calls it."""
    team = engine.team
    if not team.joined or team.number in team.joined:
        return
    of_names = {
        name: [safe_get_full_optimizer_state(parameter, key).clone() for key in _MOMENTS]
        for name, parameter in engine.module.named_parameters()
    }
    if dist.get_rank() == 0:
        target = folder / f"moments{team.number}"
        torch.save((of_names, _count(engine)), target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)


def load_moments(engine: Any, folder: Path) -> None:
    """Wait for the others' moments, and take those of the first holder of each parameter. Every rank of the team calls
    it, when it has taken weights over."""
    files = [folder / f"moments{number}" for number in engine.team.present if number not in engine.team.joined]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    of_names: dict[str, Any] = {}
    for file in reversed(files):
        of_team, count = torch.load(file)
        of_names |= of_team
    _make_state(engine)
    for name, parameter in engine.module.named_parameters():
        for key, values in zip(_MOMENTS, of_names[name], strict=True):
            safe_set_full_optimizer_state(parameter, values, key)
    for state in inner_optimizer(engine).state.values():
        state["step"].fill_(count)


def _make_state(engine: Any) -> None:
    """Let AdamW make its state, by a step that changes no weight."""
    optimizer = inner_optimizer(engine)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    engine.optimizer._lazy_init_hp_params_optimizer_state()  # DeepSpeed otherwise does so after its first step


def _count(engine: Any) -> int:
    """Steps that the moments have seen."""
    return max(int(state["step"]) for state in inner_optimizer(engine).state.values())
