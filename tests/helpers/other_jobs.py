"""Jobs of other processes that have a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from sdp_deepspeed.folder_lock import LOCK, flock
from sdp_deepspeed.lock_owner import Owner


def left_by(folder: Path, **changes: object) -> Path:
    """The lock of an owner that is gone: a process of this machine, as far as nothing else is said."""
    owner = replace(Owner.here(), pid=1234, job="python other.py", **changes)  # type: ignore[arg-type]
    path = folder / LOCK
    path.write_text(json.dumps(asdict(owner)))
    return path


@contextmanager
def other_job(folder: Path, **changes: object) -> Iterator[None]:
    """A job that has `folder`: to the kernel, who opens a file a second time is somebody else."""
    handle = os.open(left_by(folder, **changes), os.O_RDWR)
    try:
        flock(handle)
        yield
    finally:
        os.close(handle)
