"""Folders that appear complete or not at all: written aside, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """An empty folder to write to, which becomes `out` when the block ends well, and is removed when it does not.

    Raises:
        ValueError: `out` is there already and not an empty folder.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)  # of a killed run
    aside.mkdir()
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            sync(path)
        if out.exists():
            out.rmdir()
        os.rename(aside, out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file at once."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text, encoding="utf-8")
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
