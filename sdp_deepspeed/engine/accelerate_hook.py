"""Patches of Accelerate."""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from sdp_deepspeed.engine.trainer_hook import is_ours, team_of


def patch_accelerate() -> None:
    """Make `Accelerator.get_state_dict`, which the Trainer uses to save, return the dense model (collective); keep
    Accelerate from filling in "auto" in our block; and make it see all ranks on CPUs."""
    from accelerate.accelerator import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils.dataclasses import DeepSpeedPlugin

    from sdp_deepspeed.messages import KEY

    original = Accelerator.get_state_dict
    if hasattr(original, "__wrapped__"):  # patched already
        return

    @wraps(original)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if (team := team_of(model)) is not None:
            return team.dense_state_dict()  # collective in all teams
        if not is_ours(model):
            return original(self, model, *args, **kwargs)
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        with model.dense():  # state dicts are whole, even under tensor parallelism
            return clone_tensors_for_torch_save(model.module.state_dict())

    fill = DeepSpeedPlugin.fill_match

    @wraps(fill)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> None:
        if not ds_key_long.startswith(f"{KEY}."):
            fill(self, ds_key_long, *args, **kwargs)

    start = PartialState.__init__

    @wraps(start)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        start(self, cpu or _runs_deepspeed_on_cpus(), **kwargs)

    Accelerator.get_state_dict = get_state_dict
    DeepSpeedPlugin.fill_match = fill_match
    PartialState.__init__ = __init__


def _runs_deepspeed_on_cpus() -> bool:
    """Whether this is a rank of DeepSpeed on CPUs, which Accelerate would take for the only process: all ranks would
    train on the same data, until an evaluation fails."""
    import torch

    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return (
        uses_deepspeed
        and "LOCAL_RANK" in os.environ
        and (os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available())
    )
