"""Ctrl-C and SIGTERM: finish the step, save, stop.

What the deepspeed launcher (0.19.8) does, and why this looks as it does:

- Ctrl-C reaches the whole process group: every rank gets SIGINT, and SIGTERM from the launcher right after it. The
  second signal must not break what the first began, so repeats only set the flag again. SIGQUIT and SIGKILL still end
  a rank at once.
- SIGTERM to `deepspeed.launcher.launch` goes to one rank after the other, each with 30 seconds to end before it is
  killed. One rank's request therefore stops all of them (`reduce_outcome`).
- SIGTERM to the `deepspeed` command itself ends that command alone and leaves the ranks running: they notice that
  the launcher's parent is gone.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _ancestors() -> tuple[int, int]:
    """Process ids of the launcher and of the command that started it."""
    parent = os.getppid()
    try:
        return parent, psutil.Process(parent).ppid()
    except psutil.Error:
        return parent, 0


class StopRequest:
    """Turns the signals into a flag while the block runs; in the main thread of every rank."""

    def __init__(self) -> None:
        self._signaled = False
        self._ancestors = _ancestors()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        self._previous = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._signaled = True

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop, or lost its launcher."""
        return self._signaled or _ancestors() != self._ancestors


class StepOutcome(NamedTuple):
    """What all ranks know of a step that each of them made.

    Args:
        loss: mean over ranks.
        stop_requested: whether any rank was asked to stop.
        failed: whether any rank lost a record of the run.
    """

    loss: float
    stop_requested: bool
    failed: bool


def reduce_outcome(loss: torch.Tensor, *, stop_requested: bool, failed: bool) -> StepOutcome:
    """This rank's outcome (`loss` is a scalar) to that of all; all ranks call it.

    All travels in one all-reduce, and all ranks get the same answer, so that they leave the loop after the same step.
    """
    flags = loss.new_tensor([float(stop_requested), float(failed)], dtype=torch.float32)
    values = torch.cat([loss.detach().float().reshape(1), flags])
    dist.all_reduce(values)
    loss_sum, num_requests, num_failed = values.tolist()
    return StepOutcome(loss_sum / dist.get_world_size(), num_requests > 0, num_failed > 0)
