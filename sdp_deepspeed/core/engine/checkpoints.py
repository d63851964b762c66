"""DeepSpeed's calls for checkpoints: what an engine adds to the tensors that `core.checkpoint` writes and reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdp_deepspeed.core.checkpoint.manager import CheckpointManager
from sdp_deepspeed.core.engine.replan import follow_schedule, rank_state

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def new_manager(engine: Any) -> CheckpointManager:
    """As the block's `checkpoint` says; every rank calls it."""
    options = engine.block.checkpoint
    return CheckpointManager(asynchronous=options.asynchronous, keep_last=options.keep_last)


def save(engine: Any, folder: Path, tag: str | None, client_state: Mapping[str, Any], **options: bool) -> None:
    """Write a checkpoint; every rank calls it, see `CheckpointManager.save`.

    Args:
        tag: None for one that names the step.
        client_state: the caller's.
    """
    scheduler = engine.lr_scheduler
    scaler = {name: value for name, value in vars(engine.optimizer.loss_scaler).items() if _is_number(value)}
    common = {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "loss_scaler": scaler,
        "client_state": dict(client_state),
    }
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    engine.checkpoints.save(folder, name, rank_state(engine), common, **options)


def load(
    engine: Any, folder: Path, tag: str | None, *, module_only: bool, scheduler: bool, **options: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Restore a checkpoint; every rank calls it, see `CheckpointManager.load`.

    Args:
        module_only: weights alone: counters, loss scale, schedule and random numbers stay as they are.
        scheduler: whether the learning rate's schedule is restored.

    Returns:
        Path of the checkpoint and the client state; (None, None) if the folder has no checkpoint.
    """
    engine.optimizer.zero_grad()  # of a step of the run that is left
    if engine.schedule is not None and not module_only:  # ranks go on with their own state under the same plan only
        common = engine.checkpoints.common_of(folder, tag, engine.groups.control)
        follow_schedule(engine, engine.global_steps if common is None else common["counters"]["global_steps"])
    found = engine.checkpoints.load(folder, tag, rank_state(engine), own_state=not module_only, **options)
    if found is None:
        return None, None
    if not module_only:
        for name, value in found.common["counters"].items():
            setattr(engine, name, value)
        engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()  # a step begins anew
        scaler = engine.optimizer.loss_scaler
        if scaler.dynamic and found.common["loss_scaler"].get("dynamic", True):  # not the 1 of a run in bf16 or fp32
            vars(scaler).update(found.common["loss_scaler"])
    if scheduler and not module_only and engine.lr_scheduler is not None and found.common["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(found.common["lr_scheduler"])
    return str(found.path), found.common["client_state"]


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))
