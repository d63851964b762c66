"""Links: how long collectives take (the alpha-beta model: latency, and bytes over bandwidth), and how they are used."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """
    Args:
        latency: alpha, seconds per collective.
        bandwidth: beta, bytes per second in each direction.
    """

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float, num_collectives: float = 1) -> float:
        """Of collectives in which a rank sends `num_bytes` in all."""
        return num_collectives * self.latency + num_bytes / self.bandwidth


def fitted(seconds: Mapping[int, float]) -> Link:
    """The line through times by bytes that is least far from them in proportion, so that small messages count.

    Args:
        seconds: of at least two sizes.
    """
    weights = {num_bytes: 1 / value**2 for num_bytes, value in seconds.items()}
    total = sum(weights.values())
    mean_bytes = sum(weight * num_bytes for num_bytes, weight in weights.items()) / total
    mean_seconds = sum(weight * seconds[num_bytes] for num_bytes, weight in weights.items()) / total
    spread = sum(weight * (num_bytes - mean_bytes) ** 2 for num_bytes, weight in weights.items())
    together = sum(
        weight * (num_bytes - mean_bytes) * (seconds[num_bytes] - mean_seconds) for num_bytes, weight in weights.items()
    )
    slope = together / spread
    return Link(max(0.0, mean_seconds - slope * mean_bytes), 1 / slope)


class LinkWatch:
    """How a link is used over time, while the block runs: bytes that have crossed it each way, by its own counters.

    Args:
        statistics: the folder of the link's counters.
        interval: seconds between two looks.

    Attributes:
        looks: seconds, bytes sent, bytes received.
    """

    def __init__(self, statistics: Path, interval: float = 0.002) -> None:
        self._counters = statistics / "tx_bytes", statistics / "rx_bytes"
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.looks: list[tuple[float, int, int]] = []

    def __enter__(self) -> LinkWatch:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._look()

    def _look(self) -> None:
        sent, received = (int(counter.read_text()) for counter in self._counters)
        self.looks.append((time.perf_counter(), sent, received))


def use(looks: Sequence[tuple[float, int, int]]) -> dict[str, float]:
    """Seconds in which the link carried both directions, one, or none of them; less than a tenth of the highest rate
    that was seen counts as none."""
    steps = [[b - a for a, b in zip(before, after, strict=True)] for before, after in itertools.pairwise(looks)]
    steps = [step for step in steps if step[0] > 0]
    least = max((max(sent, received) / seconds for seconds, sent, received in steps), default=0.0) / 10
    found = {"both": 0.0, "one": 0.0, "none": 0.0}
    for seconds, sent, received in steps:
        num_ways = (sent / seconds > least) + (received / seconds > least)
        found[("none", "one", "both")[num_ways]] += seconds
    return found
