"""Several texts in given shares: which of them a sample is taken from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdp_deepspeed.messages import did_you_mean

SOURCE_KEYS = (
    *("source", "path", "text_column", "text_documents"),
    *("subset", "split", "revision", "streaming", "max_bytes"),
)
# Samples in which every source has exactly its share, rounded; so a share is off by less than 1/8192.
PERIOD = 4096
LARGEST_WEIGHT = 10**9


def wrong_entries(sources: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with keys and weights of the entries, in words."""
    if not sources:
        return ["sources is empty: name at least one, or drop it"]
    problems = []
    for number, entry in enumerate(sources):
        unknown = [key for key in entry if key not in (*SOURCE_KEYS, "weight")]
        problems += [
            f"sources[{number}] has an unknown key {key!r} ({did_you_mean(str(key), (*SOURCE_KEYS, 'weight'))})"
            for key in unknown
        ]
        weight = entry.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= LARGEST_WEIGHT:
            problems.append(f"sources[{number}]: weight is {weight!r}, expected a number above 0, at most 1e9")
    return problems


def shares(sources: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[str]]:
    """How many of each PERIOD samples come from each source (by largest remainder), and what is wrong with that."""
    weights = [entry.get("weight", 1) for entry in sources]
    total = math.fsum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: PERIOD - sum(counts)]:
        counts[i] += 1
    return counts, [
        f"sources[{number}]: weight is {weights[number]!r} of {total:g}, expected a share of at least "
        f"1/{PERIOD}: raise it, or drop the source"
        for number, count in enumerate(counts)
        if count == 0
    ]
