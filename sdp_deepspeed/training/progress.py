"""What the user sees while a run goes on: lines and one bar, from rank 0."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Any

import psutil
import torch
from tqdm import tqdm

from sdp_deepspeed.sizes import mib_text


def memory_bytes() -> int:
    """Memory of this process: the accelerator's peak, or on a CPU the resident set now."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return psutil.Process().memory_info().rss


class Progress:
    """A bar over steps with lines above it; silent on ranks that do not `show`.

    Whoever reads our output may be gone when a run is interrupted (Ctrl-C also ends a `| tee`), and the run must still
    save: errors of writing are dropped.
    """

    def __init__(self, *, first: int, total: int, show: bool) -> None:
        interval = 0.5 if sys.stderr.isatty() else 10.0
        self._show = show
        self._bar = tqdm(
            initial=first, total=total, unit="step", disable=not show, mininterval=interval, dynamic_ncols=True
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

    def step(self, loss: float, tokens_per_second: float) -> None:
        """One step is done."""
        if self._show:
            with contextlib.suppress(OSError):
                memory = mib_text(memory_bytes(), digits=0)
                self._bar.set_postfix(
                    {"loss": f"{loss:.3f}", "tok/s": f"{tokens_per_second:.0f}", "memory": memory}, refresh=False
                )
                self._bar.update()
