"""Atomic writes: to a temporary file, synced, then renamed. Reads accept only regular files, since reading from a
device or pipe may never end.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path


def regular(path: Path) -> Path:
    """Check that `path` is a regular file, and return it; raises OSError otherwise."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a folder, expected a file", str(path))
    return path


def write_text(path: Path, text: str, *, concurrent: bool = False) -> None:
    """Replace a file atomically; on error the old file is kept.

    Args:
        concurrent: whether other processes may write the same file at the same time; the last one wins.
    """
    unique = f".{uuid.uuid4().hex}" if concurrent else ""
    staging = path.with_name(f".{path.name}{unique}.writing")
    try:
        staging.write_text(text, encoding="utf-8")
        sync(staging)
        os.replace(staging, path)
    except BaseException:
        with suppress(OSError):  # report the original error
            staging.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
