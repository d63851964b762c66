"""What goes to DeepSpeed's monitors (TensorBoard, W&B, CSV, Comet); DeepSpeed 0.19.8 itself writes the learning rate.

Every `steps_per_print`-th step (without one every tenth) all ranks gather their figures once, and rank 0 writes. Other
steps take nothing but a comparison, and without a monitor nothing is installed. A process's first step is not written.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.engine.held_bytes import (
    gradient_tensors,
    optimizer_tensors,
    resident_bytes,
    storage_bytes,
    weight_tensors,
)
from sdp_deepspeed.engine.step_watch import StepWatch, clock_of
from sdp_deepspeed.plan.plan import Plan

PREFIX = "Train/Samples"  # DeepSpeed's own; all events have samples as their step
_DEFAULT_INTERVAL = 10

Event = tuple[str, float, int]


@dataclass(frozen=True)
class RankFigures:
    """Of one rank in one step.

    Args:
        loss: of its micro-batches, see `loss_of_step`; None if the caller did not hand them to `engine.backward`.
        gradient_norm: of the averaged dense gradient; None if it was not computed.
        seconds: of the step.
        own_seconds: those in which it waited for no other rank: between `step`, `backward` and the next `step`, which
            is the forward pass and whatever brings batches.
        exchange_seconds: in which it waited for the exchange's collectives; None for an engine of DeepSpeed's own.
        sent: bytes; None if nobody counted.
        weights, gradients, optimizer: bytes; of gradients what is there before the engine's `step`.
        peak: bytes since the process began; of tensors on a GPU, else of the whole process.
    """

    loss: float | None
    gradient_norm: float | None
    seconds: float
    own_seconds: float
    exchange_seconds: float | None
    sent: int | None
    weights: int
    gradients: int
    optimizer: int
    peak: int


def events_of(
    ranks: Sequence[RankFigures], *, num_samples: int, batch_size: int, loss_name: str = "train_loss"
) -> list[Event]:
    """What rank 0 writes.

    Bytes are those of the rank with most. The slowest rank is that with most seconds of its own, set against the
    median rank: others wait for it, so that whole steps take equally long on all.

    Args:
        num_samples: trained so far.
        batch_size: samples of a step.
        loss_name: "subnetwork_loss" where a loss is not the dense model's.
    """
    own = [rank.own_seconds for rank in ranks]
    losses = [rank.loss for rank in ranks if rank.loss is not None]
    waits = [rank.exchange_seconds for rank in ranks if rank.exchange_seconds is not None]
    sent = [rank.sent for rank in ranks if rank.sent is not None]
    seconds, median = max(rank.seconds for rank in ranks), statistics.median(own)
    values: dict[str, float | None] = {
        loss_name: sum(losses) / len(losses) if losses else None,
        "gradient_norm": ranks[0].gradient_norm,
        "step_seconds": seconds,
        "samples_per_second": batch_size / seconds,
        **{f"memory_{kind}_bytes": max(getattr(rank, kind) for rank in ranks) for kind in _MEMORY},
        "sent_bytes": max(sent) if sent else None,
        "exchange_seconds_least": min(waits) if waits else None,
        "exchange_seconds_most": max(waits) if waits else None,
        "slowest_rank": own.index(max(own)),
        "slowest_over_median": max(own) / median if median else None,
    }
    return [(f"{PREFIX}/{name}", float(value), num_samples) for name, value in values.items() if value is not None]


_MEMORY = ("weights", "gradients", "optimizer", "peak")


def loss_of_step(losses: Sequence[torch.Tensor], *, are_shares: bool) -> float | None:
    """Of what went into `engine.backward`.

    Args:
        losses: of a step's micro-batches; None comes of none.
        are_shares: `scale_wrt_gas=False`: the caller has divided, by the number of micro-batches or by that of all
            their tokens (Transformers' Trainer does), so that the sum is the step's loss. Else it is the mean.
    """
    if not losses:
        return None
    values = torch.stack(tuple(losses)).float()
    return float(values.sum() if are_shares else values.mean())


class StepEvents:
    """Watches the steps that are written; every rank has one.

    Args:
        engine: ours, or DeepSpeed's own.
        ranks: all of them.
        interval: steps between two that are written, the same on every rank.
        dp_group: whose exchange is metered; None for an engine of DeepSpeed's own.
    """

    def __init__(self, engine: Any, ranks: Gatherer, *, interval: int, dp_group: Communicator | None = None) -> None:
        self.interval = interval
        self._engine, self._ranks, self._dp_group = engine, ranks, dp_group
        self._watch = StepWatch(clock_of(engine.device))
        self._watches = -1  # the step that is watched from its beginning
        self._losses: list[torch.Tensor] = []
        self._are_shares = False
        self._gradients = 0
        self._exchange = ExitStack()  # while a step is made that is written
        self._figures_before: RankFigures | None = None  # a re-plan at its end
        self._backward, self._step, self._train = engine.backward, engine.step, engine.train
        self._replan: Any = getattr(engine, "_replan", None)  # ours alone

    def install(self) -> None:
        """Take the place of the engine's methods; they are called as before."""
        self._engine.backward, self._engine.step, self._engine.train = self.backward, self.step, self.train
        if self._replan is not None:
            self._engine._replan = self.replan

    def backward(self, loss: Any, *options: Any, **more: Any) -> Any:
        """As the engine's."""
        if not self._is_watched():
            return self._backward(loss, *options, **more)
        if isinstance(loss, torch.Tensor):
            self._losses.append(loss.detach())
            self._are_shares = not _scales(*options, **more)
        with self._watch.together(), self._metered():
            return self._backward(loss, *options, **more)

    def step(self, *options: Any, **more: Any) -> Any:
        """As the engine's; after a step that is written also a collective of all ranks."""
        before, is_watched, loss_name = self._engine.global_steps, self._is_watched(), self._loss_name()
        if is_watched:
            self._gradients = max(self._gradients, storage_bytes(gradient_tensors(self._engine)))
            with self._exchange as exchange:
                exchange.enter_context(self._watch.together())
                exchange.enter_context(self._metered())
                result = self._step(*options, **more)
        else:
            result = self._step(*options, **more)
        if self._engine.global_steps != before:
            if is_watched:
                self._write(loss_name)
            self._begin()
        return result

    def replan(self, *options: Any, **more: Any) -> Any:
        """As the engine's. At the end of a step that is written it is no part of it."""
        if self._dp_group is not None and self._dp_group.meter is not None:
            self._exchange.close()
            self._figures_before = self._figures()
        return self._replan(*options, **more)

    def train(self, mode: bool = True) -> Any:
        """As the engine's; an evaluation is no part of a step."""
        was_evaluating = not self._engine.module.training
        result = self._train(mode)
        if mode and was_evaluating:
            self._begin()
        return result

    def _is_watched(self) -> bool:
        return self._watches == self._engine.global_steps + 1

    def _begin(self) -> None:
        """The next step is watched if it is to be written."""
        step = self._engine.global_steps + 1
        self._losses.clear()
        self._gradients, self._watches = 0, -1
        if step % self.interval == 0:
            self._watches = step
            self._watch.begin()

    def _metered(self) -> Any:
        return _Metering(self._dp_group, self._watch)

    def _loss_name(self) -> str:
        plan: Plan | None = getattr(self._engine, "plan", None)
        return "subnetwork_loss" if plan is not None and plan.trains_subnetworks else "train_loss"

    def _write(self, loss_name: str) -> None:
        ranks = self._ranks.gather_objects(self._figures_before or self._figures())
        self._figures_before = None
        if self._ranks.rank == 0:
            engine = self._engine
            num_samples, batch_size = engine.global_samples, engine.train_batch_size()
            engine.monitor.write_events(
                events_of(ranks, num_samples=num_samples, batch_size=batch_size, loss_name=loss_name)
            )

    def _figures(self) -> RankFigures:
        engine, seen = self._engine, set[int]()
        seconds, own_seconds, waits = self._watch.seconds()
        norm = engine.get_global_grad_norm()
        is_metered = self._dp_group is not None
        return RankFigures(
            loss=loss_of_step(self._losses, are_shares=self._are_shares),
            gradient_norm=None if norm is None else float(norm),
            seconds=seconds,
            own_seconds=own_seconds,
            exchange_seconds=waits if is_metered else None,
            sent=self._watch.sent if is_metered else None,
            weights=storage_bytes(weight_tensors(engine), seen),
            gradients=self._gradients,
            optimizer=storage_bytes(optimizer_tensors(engine), seen),
            peak=_peak_bytes(engine.device),
        )


@dataclass(frozen=True)
class _Metering:
    """Context in which a group's all-to-alls are metered."""

    group: Communicator | None
    watch: StepWatch

    def __enter__(self) -> None:
        if self.group is not None:
            self.group.meter = self.watch

    def __exit__(self, *error: object) -> None:
        if self.group is not None:
            self.group.meter = None


def _scales(retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any) -> bool:
    """Whether the engine's `backward` divides the loss, from the options after the loss."""
    return scale_wrt_gas


def _peak_bytes(device: torch.device) -> int:
    """Largest since the process began: of tensors on a GPU, else of the process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_bytes()


def write_step_events(engine: Any, ranks: Gatherer, *, dp_group: Communicator | None = None) -> StepEvents | None:
    """Have an engine's steps written if rank 0, which writes, has a monitor; every rank calls it.

    Returns:
        What writes them; None without a monitor.
    """
    enabled, given = ranks.gather_objects((bool(engine.monitor.enabled), engine.steps_per_print()))[0]
    if not enabled:
        return None
    interval = int(given) if given and math.isfinite(given) else _DEFAULT_INTERVAL  # Accelerate gives infinity
    events = StepEvents(engine, ranks, interval=interval, dp_group=dp_group)
    events.install()
    return events
