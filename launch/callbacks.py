"""Stop a distributed run together and find where it goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerState


class StopSignal:
    """Whether any rank was asked to stop: by SIGTERM, by Ctrl-C, or because its launcher is gone.

    Further signals change nothing: the Ctrl-C of a terminal reaches a rank twice, since `torchrun` passes it on. What
    does not end is killed by its launcher.
    """

    def __init__(self, device: torch.device) -> None:
        self.asked = torch.zeros((), device=device)
        self.launcher = psutil.Process(os.getppid())
        self.command = self._command()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.asked.fill_(1))

    def _command(self) -> int | None:
        """The process of the `deepspeed` command, which starts the launcher; SIGTERM ends it alone."""
        try:
            command = self.launcher.parent()
            return command.pid if command is not None and "deepspeed" in " ".join(command.cmdline()) else None
        except psutil.Error:
            return None

    def on_any_rank(self) -> bool:
        """Collective: every rank calls it between two steps, and all get the same answer."""
        if os.getppid() != self.launcher.pid or self._command() != self.command:
            self.asked.fill_(1)
        asked = self.asked.clone()
        if dist.is_initialized():
            dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)


class StopTogether(TrainerCallback):
    """When one rank is asked to stop, all ranks finish the step, save, and stop."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.signal = StopSignal(args.device)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.signal.on_any_rank():
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # launchers grant half a minute


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint that the Trainer saved in a run's folder: its state is written last."""
    found = sorted(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        try:
            TrainerState.load_from_json(str(path / "trainer_state.json"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None
