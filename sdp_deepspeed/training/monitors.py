"""What this program adds to the events of DeepSpeed's monitors: the engine's own are in `engine/step_events.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.engine.step_events import PREFIX, StepEvents, write_step_events
from sdp_deepspeed.training.engines import is_stock

VALIDATION = "Validation/Samples"


def step_events_of(engine: Any, world: Gatherer) -> StepEvents | None:
    """Those of our engine, or the same for an engine of DeepSpeed's own; None without a monitor. A collective."""
    return write_step_events(engine, world) if is_stock(engine) else engine.step_events


def count_sent(events: StepEvents | None, figures: Mapping[str, Any]) -> None:
    """Have what a measured step sent written where no exchange of ours is metered."""
    if events is not None:
        events.sent = figures["sent"]


def write_throughput(engine: Any, events: StepEvents | None, items: str, per_second: float) -> None:
    """After a step, if it is one that is written.

    Args:
        items: "tokens" or "images".
    """
    if events is not None and engine.global_steps % events.interval == 0:
        engine.monitor.write_events([(f"{PREFIX}/{items}_per_second", per_second, engine.global_samples)])


def write_evaluation(engine: Any, events: StepEvents | None, dense_loss: float) -> None:
    """After an evaluation."""
    if events is not None:
        engine.monitor.write_events([(f"{VALIDATION}/dense_loss", dense_loss, engine.global_samples)])
