"""Stop all ranks of a run together, with a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback


class StopSignal:
    """Whether any rank should stop: it received SIGTERM or Ctrl-C, or its launcher has exited.

    Repeated signals are ignored: Ctrl-C in a terminal reaches a rank twice, since `torchrun` forwards it. The launcher
    kills ranks that do not exit in time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.asked = device, False
        self.launcher = psutil.Process(os.getppid())
        self.command = self._command()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def _command(self) -> int | None:
        """Pid of the `deepspeed` command that started the launcher; SIGTERM to it does not reach the launcher."""
        try:
            command = self.launcher.parent()
            names = [] if command is None else [Path(argument).name for argument in command.cmdline()[:2]]
            return command.pid if command is not None and "deepspeed" in names else None
        except psutil.Error:
            return None

    def on_any_rank(self) -> bool:
        """Collective between two steps; all ranks get the same answer."""
        if os.getppid() != self.launcher.pid or self._command() != self.command:
            self.asked = True
        asked = torch.tensor(float(self.asked), device=self.device)
        if dist.is_initialized():
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)


_STOPS = {signal.SIGINT, signal.SIGTERM}


def _outlive_a_stop(worker: int, then: Callable[[int], None] | None) -> None:
    """Initialize a dataloader worker that survives the signal that stops the run, until its batches are consumed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: signal.signal(number, signal.SIG_DFL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    if then is not None:
        then(worker)


class StopTogether(TrainerCallback):
    """When one rank is asked to stop, all ranks finish the step, save, and stop.

    Args:
        saves: whether they save. All teams save together, so one that stops alone does not.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self.saves = saves

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self.signal = StopSignal(args.device)
        loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # unwraps Accelerate's
        if getattr(loader, "num_workers", 0):
            # Not "forkserver", Python 3.14's default: the signal would end the server and with it the workers.
            loader.multiprocessing_context = "fork"
            # Block the signals from the fork on, until PyTorch calls worker_init_fn.
            os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS))
            loader.worker_init_fn = partial(_outlive_a_stop, then=loader.worker_init_fn)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.signal.on_any_rank():
            control.should_save, control.should_training_stop = self.saves, True
            control.should_evaluate = False  # launchers kill ranks after half a minute
