"""The system's errors in the words of checkpoints: which file, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def translated_write_errors(path: Path) -> Iterator[None]:
    """RuntimeError that names `path`: where a disk is full the system's error does not."""
    try:
        yield
    except OSError as problem:
        raise RuntimeError(
            f"checkpoint: cannot write {path}: {problem.strerror or problem}; earlier checkpoints are intact"
        ) from problem


def translating_os_errors(work: Callable[[], T]) -> Callable[[], T]:
    """`work` with a RuntimeError that names the file instead of the system's error."""

    def translated() -> T:
        try:
            return work()
        except OSError as problem:
            text = f"checkpoint: {problem.strerror or problem}: {problem.filename or ''}"
            raise RuntimeError(text.rstrip(": ")) from problem

    return translated
