"""What a corpus consists of: parts that are read each on its own, by any process, in one order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from sdp_deepspeed.data.shuffle import shuffled

# Bytes of text: seconds of work for a process, so that a killed one loses little, and a part's own cost is small.
PART_BYTES = 2_000_000


class Part(Protocol):
    """Some documents. Parts travel to other processes."""

    @property
    def size(self) -> int:
        """Bytes to read, roughly: for a progress bar."""
        ...

    def documents(self) -> Iterator[str]:
        """None of them blank; ValueError names a file that cannot be read."""
        ...


def documents_of(parts: Iterable[Part]) -> Iterator[str]:
    """All documents of the parts."""
    for part in parts:
        yield from part.documents()


def grouped(paths: Iterable[Path]) -> Iterator[tuple[tuple[Path, ...], int]]:
    """Files in their order, small ones together, with the bytes of each group."""
    group: list[Path] = []
    size = 0
    for path in paths:
        group.append(path)
        size += path.stat().st_size
        if size >= PART_BYTES:
            yield tuple(group), size
            group, size = [], 0
    if group:
        yield tuple(group), size


def in_stream_order(parts: Sequence[Part]) -> list[Part]:
    """A fixed shuffle of the parts, the same for all seeds, which can then share one cache.

    Files that were crawled together lie together; a window of blocks in training then has text of many of them.
    """
    places = shuffled(np.arange(len(parts)), num_items=len(parts), seed=0, epoch=0)
    return [parts[int(i)] for i in places]


def capped(documents: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """Documents up to so many bytes of UTF-8."""
    total = 0
    for text in documents:
        total += len(text.encode("utf-8"))
        if max_bytes is not None and total > max_bytes:
            return
        yield text
