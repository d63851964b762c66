"""Files and folders that are complete or absent: written beside their place, synced, renamed.

What is not yet complete lies in a hidden staging path beside its place. An error removes it; what a killed process left
there is replaced by the next writer.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def staging_path(path: Path, *, concurrent: bool = False) -> Path:
    """Where `path` is written until it is complete.

    Args:
        concurrent: other processes may write the same path at the same time, so that each needs a place of its own.
    """
    unique = f".{uuid.uuid4().hex}" if concurrent else ""
    return path.with_name(f".{path.name}{unique}.writing")


@contextmanager
def complete_or_absent(out: Path, *, concurrent: bool = False) -> Iterator[Path]:
    """An empty folder to write to, which becomes `out` when the block ends well, and is removed when it does not.

    Args:
        concurrent: other processes may make the same folder at the same time. The first one's stays, and as it came by
            a rename too, it is whole; the others' are removed.

    Raises:
        ValueError: `out` is there already and not an empty folder; not if it is made concurrently.
    """
    if not concurrent and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_path(out, concurrent=concurrent)
    shutil.rmtree(staging, ignore_errors=True)  # of a killed process
    staging.mkdir()
    try:
        yield staging
        for path in (*staging.rglob("*"), staging):
            sync(path)
        try:
            os.rename(staging, out)
        except OSError:
            if not (concurrent and out.is_dir()):
                raise
            shutil.rmtree(staging)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_text(path: Path, text: str, *, permissions: int | None = None, concurrent: bool = False) -> None:
    """Replace a file at once; if it cannot be written it stays as it was.

    Args:
        permissions: of the new file; None for those that the process gives to its files.
        concurrent: other processes may write the same file at the same time; the last one's stays.
    """
    staging = staging_path(path, concurrent=concurrent)
    try:
        staging.write_text(text, encoding="utf-8")
        if permissions is not None:
            os.chmod(staging, permissions)
        sync(staging)
        os.replace(staging, path)
    except BaseException:
        with suppress(OSError):  # the error that led here is the one to tell
            staging.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder, if it is there, with all that is in it; also while another thread or process does the same."""
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def sync(path: Path) -> None:
    """Until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
