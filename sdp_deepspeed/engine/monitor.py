"""Events for DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet), in addition to the learning rate that DeepSpeed
writes."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from sdp_deepspeed.engine.core import Core
from sdp_deepspeed.parallel.consistency import gather_objects

_DEFAULT_INTERVAL = 10  # steps


class StepEvents:
    """Writes loss, gradient norm and coverage of every `steps_per_print`-th step.

    The loss is the mean of the arguments of `engine.backward` over ranks and micro-batches; it is summed over
    micro-batches if the caller has divided already (`scale_wrt_gas=False`, as in Transformers' Trainer). It is called
    "subnetwork_loss" while ranks train subnetworks, else "train_loss". The constructor is collective: rank 0, which
    writes the events, has the interval.
    """

    def __init__(self, engine: DeepSpeedEngine, core: Core) -> None:
        self._engine, self._core = engine, core
        self._losses: list[torch.Tensor] = []
        self._are_shares = False
        enabled, given = gather_objects((bool(engine.monitor.enabled), engine.steps_per_print()), core.control)[0]
        interval = int(given) if given and math.isfinite(given) else _DEFAULT_INTERVAL  # Accelerate passes infinity
        self._interval = interval if enabled else None

    def note(self, loss: Any, *, is_share: bool) -> None:
        """Record the loss, before a backward pass.

        Args:
            is_share: whether losses are shares, to be summed, not averaged, over micro-batches.
        """
        if self._interval is not None and isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
            self._are_shares = is_share

    def write(self) -> None:
        """Write the events of a step; collective."""
        losses, self._losses = self._losses, []
        if self._interval is None or self._engine.global_steps % self._interval:
            return
        engine = self._engine
        total = float(torch.stack(losses).float().sum()) if losses else math.nan
        mean = total if self._are_shares or not losses else total / len(losses)
        every = gather_objects(mean, self._core.control)
        values = {
            "subnetwork_loss" if self._core.plan.trains_subnetworks else "train_loss": sum(every) / len(every),
            "gradient_norm": engine.get_global_grad_norm(),
            "coverage": self._core.coverage,
        }
        engine.monitor.write_events(
            [(f"Train/Samples/{name}", float(v), engine.global_samples) for name, v in values.items() if v is not None]
        )
