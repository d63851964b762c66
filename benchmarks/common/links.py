"""Links: how long collectives take (the alpha-beta model: latency, and bytes over bandwidth), and how they are used."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Bytes that namespaces.sh lets pass at once after a pause: a message of no more takes no time on the link.
BURST = 128 * 1024


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


def fitted(seconds: Mapping[int, float], *, above: int = 0) -> Link:
    """The line through times by bytes that is least far from them in proportion, so that small messages count. Where it
    would say that a collective ends before it begins, or that bytes take no time, the line through the origin instead.

    Args:
        above: of larger sizes only.

    Raises:
        ValueError: there are not two sizes.
    """
    points = {num_bytes: value for num_bytes, value in seconds.items() if num_bytes > above}
    if len(points) < 2:
        raise ValueError(f"a line needs two sizes above {above} bytes, and got {sorted(seconds)}")
    weights = {num_bytes: 1 / value**2 for num_bytes, value in points.items()}
    total = sum(weights.values())
    mean_bytes = sum(weight * num_bytes for num_bytes, weight in weights.items()) / total
    mean_seconds = sum(weight * points[num_bytes] for num_bytes, weight in weights.items()) / total
    slope = _slope(points, weights, mean_bytes, mean_seconds)
    latency = mean_seconds - slope * mean_bytes
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, _slope(points, weights, 0.0, 0.0)
    return Link(latency, 1 / slope)


def _slope(points: Mapping[int, float], weights: Mapping[int, float], bytes_at: float, seconds_at: float) -> float:
    """Seconds per byte of the best line through one point."""
    spread = sum(weight * (num_bytes - bytes_at) ** 2 for num_bytes, weight in weights.items())
    together = sum(
        weight * (num_bytes - bytes_at) * (points[num_bytes] - seconds_at) for num_bytes, weight in weights.items()
    )
    return together / spread


def lines_of(seconds: Mapping[str, Mapping[Any, Sequence[float]]]) -> dict[str, Link]:
    """Of each collective the line through its medians, of messages that are large beside the burst.

    Args:
        seconds: of link_rates.py; sizes may be keys of JSON.

    Raises:
        ValueError: a collective was not measured with two such sizes.
    """
    medians = {name: {int(n): statistics.median(values) for n, values in of.items()} for name, of in seconds.items()}
    return {name: fitted(of, above=2 * BURST) for name, of in medians.items()}


def rate(words: str) -> float:
    """Bytes per second of a rate as tc takes it.

    Args:
        words: such as "1gbit" or "250mbit".
    """
    digits, unit = words[:-4], words[-4:]
    return float(digits) * {"gbit": 1e9, "mbit": 1e6}[unit] / 8


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
