"""DeepSpeed's checkpoint methods: add the engine's state to the tensors that `checkpoint` saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdp_deepspeed.checkpoint.save_and_load import COUNTERS
from sdp_deepspeed.engine.plans import follow_schedule, rank_state

if TYPE_CHECKING:
    from sdp_deepspeed.engine.engine import SubnetworkEngine


def save_engine(
    engine: SubnetworkEngine, folder: Path, tag: str | None, client_state: Mapping[str, Any], **options: bool
) -> None:
    """Save a checkpoint; collective. See `Checkpointer.save`.

    Args:
        tag: name of the checkpoint. Default: the step.
    """
    scheduler = engine.lr_scheduler
    scaler = vars(engine.optimizer.loss_scaler)
    common = {
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "loss_scaler": {name: value for name, value in scaler.items() if isinstance(value, bool | int | float)},
        "client_state": dict(client_state),
    }
    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    engine.checkpoints.save(folder, name, rank_state(engine), common, **options)


def load_engine(
    engine: SubnetworkEngine, folder: Path, tag: str | None, *, module_only: bool, scheduler: bool, **options: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Load a checkpoint; collective. See `Checkpointer.restore`.

    Args:
        module_only: whether to load weights only, and keep counters, loss scale, LR scheduler and random state.
        scheduler: whether to load the state of the LR scheduler.

    Returns:
        Path of the checkpoint and the client state; (None, None) if the folder has no checkpoint.
    """
    lr_scheduler = engine.lr_scheduler if scheduler and not module_only else None
    checkpoint = engine.checkpoints.find(folder, tag, engine.groups.control, lr_scheduler=lr_scheduler)
    if checkpoint is None:
        return None, None
    common = checkpoint.facts["common"]
    engine.optimizer.zero_grad()  # drop gradients of the current run
    if not module_only:  # per-rank state is restored under the same plan only
        follow_schedule(engine, common["counters"]["global_steps"])
    engine.checkpoints.restore(checkpoint, rank_state(engine), own_state=not module_only, **options)
    if not module_only:
        _restore_progress(engine, common["counters"], common["lr_scheduler"] if scheduler else None)
        scaler = engine.optimizer.loss_scaler
        if scaler.dynamic and common["loss_scaler"].get("dynamic", True):  # a run in bf16 or fp32 saved the scale 1
            vars(scaler).update(common["loss_scaler"])
    return str(checkpoint.path), common["client_state"]


def _restore_progress(engine: SubnetworkEngine, counters: Mapping[str, int], scheduler: Any) -> None:
    """Set counters and restart the current step, which may have a different number of micro-batches.

    Args:
        scheduler: state of the LR scheduler; None keeps the current one.
    """
    for name, value in counters.items():
        setattr(engine, name, value)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    if engine.lr_scheduler is not None and scheduler is not None:
        engine.lr_scheduler.load_state_dict(scheduler)
