"""What the user sees while a run goes on: lines and one bar, from rank 0; where there is no terminal, lines alone."""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import timedelta
from types import TracebackType
from typing import Any

import psutil
import torch
from tqdm import tqdm

from sdp_deepspeed.sizes import mib_text

_SECONDS_BETWEEN_LINES = 10.0


def memory_bytes() -> int:
    """Memory of this process: the accelerator's peak, or on a CPU the resident set now."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss


class Progress:
    """How far a run is and how long it will take; silent on ranks that do not `show`.

    On a terminal a bar with lines above it. Elsewhere (a log file, a scheduler) a line every ten seconds and one for
    the last step, as a bar would leave hundreds of its states there.

    Whoever reads our output may be gone when a run is interrupted (Ctrl-C also ends a `| tee`), and the run must still
    save: errors of writing are dropped.
    """

    def __init__(self, *, first: int, total: int, show: bool, items: str = "tokens") -> None:
        self._show = show
        self._rate = {"tokens": "tok/s", "images": "img/s"}[items]
        self._step, self._total = first, total
        self._lines = _Lines()
        self._has_bar = show and sys.stderr.isatty()
        self._bar = tqdm(
            initial=first, total=total, unit="step", disable=not self._has_bar, mininterval=0.5, dynamic_ncols=True
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._bar.close()

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._show:
            with contextlib.suppress(OSError):
                self._bar.write(text, file=sys.stdout)
                sys.stdout.flush()

    def step(self, loss: float, items_per_second: float) -> None:
        """One step is done."""
        self._step += 1
        self._lines.count()
        if not self._show or not (self._has_bar or self._lines.are_due(self._step == self._total)):
            return
        figures = {"loss": f"{loss:.3f}", self._rate: f"{items_per_second:.0f}"}
        figures["memory"] = mib_text(memory_bytes(), digits=0)
        with contextlib.suppress(OSError):
            if self._has_bar:
                self._bar.set_postfix(figures, refresh=False)
                self._bar.update()
            else:
                print(self._lines.line(self._step, self._total, figures), file=sys.stderr, flush=True)


class _Lines:
    """In place of a bar."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._began = self._last = time.monotonic()

    def count(self) -> None:
        """One step is done; the first one warms up, and an evaluation may have come before it."""
        self._num_steps += 1
        if self._num_steps == 1:
            self._began = time.monotonic()

    def are_due(self, is_last: bool) -> bool:
        """Whether it is time for one."""
        return is_last or time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES

    def line(self, step: int, total: int, figures: dict[str, str]) -> str:
        """The time that is left is that of the steps to come, at the mean of this process's steps but its first."""
        self._last = time.monotonic()
        texts = ", ".join(f"{name}={text}" for name, text in figures.items())
        if self._num_steps > 1:
            left = (total - step) * (self._last - self._began) / (self._num_steps - 1)
            texts += f", {timedelta(seconds=round(left))} left"
        return f"step {step}/{total}: {texts}"
