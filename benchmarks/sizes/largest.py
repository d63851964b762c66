"""The largest micro-batch that fits into a GPU's memory: tried, not extrapolated; a line only says where to begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.common.device import device

MOST_ROWS = 1024


@dataclass(frozen=True)
class DeviceMemory:
    """Of PyTorch's allocator on the current GPU; bytes."""

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Of live tensors, since `reset`."""
        return torch.cuda.max_memory_allocated()

    def total(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """In the block the allocator raises torch.OutOfMemoryError rather than reserve more than that."""
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / self.total())
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def device_memory() -> DeviceMemory | None:
    """None where nobody tells."""
    return DeviceMemory() if device().type == "cuda" else None


def largest(fits: Callable[[int], bool], guess: int, most: int = MOST_ROWS) -> int:
    """The largest number of rows for which `fits`, 0 if none does. It fits, and one more row was tried and does not.

    Args:
        fits: of a number of rows from 1; what fits with more rows fits with fewer.
        guess: from which steps grow: near it few are tried.
        most: is not exceeded, and one more not tried.
    """
    guess = min(max(guess, 1), most)
    low, high, step = 0, most + 1, 1  # low fits, high does not
    at = guess
    while low < at < high:
        if fits(at):
            low = at
            at = min(at + step, most) if high > most else (low + high) // 2
        else:
            high = at
            at = max(at - step, 1) if low == 0 else (low + high) // 2
        step *= 2
    return low


def guessed_rows(peaks: dict[int, int], limit: int) -> int:
    """By a line through two measured peaks.

    Args:
        peaks: bytes by number of rows, two.
    """
    (few, low), (many, high) = sorted(peaks.items())
    slope = max(1.0, (high - low) / (many - few))
    return int(many + (limit - high) // slope)
