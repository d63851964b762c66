"""Remove the locks of killed builds: PyTorch, which compiles DeepSpeed's operators, waits for them forever.

A build keeps its lock (`<operator>/lock`, an empty file) open. If all processes that could be building are visible, a
lock that none of them has open is stale.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAX_BUILD_SECONDS = 15 * 60.0
_TRIES, _SECONDS_BETWEEN_TRIES = 30, 0.1  # to wait for another rank that is looking
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"}  # file systems that other machines do not see
_PRIVATE = {"overlay", "tmpfs"}  # nor other containers
_PROC = Path("/proc")
_FIRST_NAMESPACE = "pid:[4026531836]"  # contains all processes; the kernel fixes this number


def remove_abandoned_builds() -> list[str]:
    """Remove stale locks, one process at a time.

    Returns:
        Messages: the locks that were removed, and those that the user should look at.
    """
    texts = []
    for lock in _locks():
        with suppress(OSError), _alone_in(lock.parent):  # released or removed meanwhile, or without permission
            if text := _look_at(lock):
                texts.append(text)
    return texts


def _locks() -> list[Path]:
    """Locks in PyTorch's folder for operators; by default one subfolder per device type."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions").expanduser()
    return sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock of the folder, so that no other rank starts to build between our check and the removal."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(_TRIES):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_SECONDS_BETWEEN_TRIES)
                continue
            except OSError:  # not supported by every file system
                pass
            break
        yield
    finally:
        os.close(handle)


def _look_at(lock: Path) -> str | None:
    seen = os.stat(lock)
    age = time.time() - seen.st_mtime
    if seen.st_size or _is_open_in_a_process(lock):
        return None
    text = f"{lock} was left {age / 60:.0f} minutes ago by a build of an operator"
    if age < _MAX_BUILD_SECONDS and not (_sees_all_builds(lock) and seen.st_uid == os.getuid()):
        return (
            f"{text} that no process here runs, so this run would wait forever; delete the file if no other machine, "
            "container or user is building"
        )
    if os.path.samestat(seen, os.stat(lock)):
        os.unlink(lock)
    return f"{text} that was killed; the file is removed"


def _is_open_in_a_process(lock: Path) -> bool:
    """Whether a process that we may inspect has the file open: our own processes, or all as superuser."""
    name = str(lock.resolve())
    for process in filter(str.isdigit, os.listdir(_PROC)):
        with suppress(OSError):  # the process has ended, or belongs to another user
            for link in os.scandir(_PROC / process / "fd"):
                with suppress(OSError):
                    if os.readlink(link) == name:
                        return True
    return False


def _sees_all_builds(lock: Path) -> bool:
    """Whether all processes that could build in this folder are visible to us."""
    try:
        mounts = [line.split()[1:3] for line in (_PROC / "self/mounts").read_text(encoding="utf-8").splitlines()]
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return False
    above = {"/", *map(str, lock.resolve().parents)}
    kind = max(((len(place), index, kind) for index, (place, kind) in enumerate(mounts) if place in above))[2]
    return kind in _PRIVATE or (kind in _LOCAL and namespace == _FIRST_NAMESPACE)
