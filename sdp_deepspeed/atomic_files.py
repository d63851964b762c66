"""Files that are complete or absent: written beside their place, synced, renamed. Only regular files are read: from a
device or a pipe reading may never end.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path


def regular(path: Path) -> Path:
    """`path`, which is to be read.

    Raises:
        OSError: it is not there, or neither a file nor a link to one.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a folder, expected a file", str(path))
    return path


def write_text(path: Path, text: str, *, concurrent: bool = False) -> None:
    """Replace a file at once; if it cannot be written it stays as it was.

    Args:
        concurrent: other processes may write the same file at the same time; the last one's stays.
    """
    unique = f".{uuid.uuid4().hex}" if concurrent else ""
    staging = path.with_name(f".{path.name}{unique}.writing")
    try:
        staging.write_text(text, encoding="utf-8")
        sync(staging)
        os.replace(staging, path)
    except BaseException:
        with suppress(OSError):  # the error that led here is the one to tell
            staging.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
