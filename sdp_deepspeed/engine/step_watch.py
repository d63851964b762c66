"""Where the time of one training step goes, and what is sent in it, without a wait of its own.

On a GPU the marks are events of the current stream: the host goes on, and only who asks for figures waits for the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


class HostClock:
    """Marks are points of the host's time, in seconds."""

    def mark(self) -> Any:
        return time.perf_counter()

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two marks."""
        return float(stop - start)


class GpuClock(HostClock):
    """Marks are points of the GPU's current stream."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Between two marks; waits for the second one."""
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1000


def clock_of(device: torch.device) -> HostClock:
    """That on which a step's work on `device` can be timed."""
    return GpuClock() if device.type == "cuda" else HostClock()


@dataclass
class StepWatch:
    """One step of one rank, from the end of the step before.

    Args:
        clock: of the device.

    Attributes:
        sent: bytes that went into metered collectives for other ranks.
    """

    clock: HostClock
    sent: int = 0
    _together: list[tuple[Any, Any]] = field(default_factory=list)
    _waits: list[tuple[Any, Any]] = field(default_factory=list)
    _start: Any = None

    def begin(self) -> None:
        """The step begins now."""
        self._start, self.sent = self.clock.mark(), 0
        self._together.clear()
        self._waits.clear()

    @contextmanager
    def together(self) -> Iterator[None]:
        """The block has collectives: what ranks spend here they may spend waiting for each other."""
        start = self.clock.mark()
        try:
            yield
        finally:
            self._together.append((start, self.clock.mark()))

    def metered(self, work: Any, num_bytes: int) -> Any:
        """A collective in which this rank sends `num_bytes`, whose wait is timed."""
        self.sent += num_bytes
        return _Metered(work, self)

    def wait_for(self, work: Any) -> None:
        """Wait for a metered collective: the host, or on a GPU the current stream."""
        start = self.clock.mark()
        work.wait()
        self._waits.append((start, self.clock.mark()))

    def seconds(self) -> tuple[float, float, float]:
        """Of the step up to now; outside of `together`, where nobody waits for another rank; in metered waits."""
        whole = self.clock.seconds(self._start, self.clock.mark())
        together, waits = (sum(self.clock.seconds(*pair) for pair in pairs) for pairs in (self._together, self._waits))
        return whole, max(0.0, whole - together), waits


@dataclass(frozen=True)
class _Metered:
    work: Any
    watch: StepWatch

    def wait(self) -> None:
        self.watch.wait_for(self.work)
