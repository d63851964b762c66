"""Locks of killed builds: DeepSpeed compiles operators through PyTorch, which waits for them without end or a word.

A build keeps its lock (`<operator>/lock`, an empty file) open. So where all processes that could build are to be seen,
a lock that none of them has open is nobody's.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAX_BUILD_SECONDS = 15 * 60.0
_TRIES, _SECONDS_BETWEEN_TRIES = 30, 0.1  # for another rank that looks; one that was stopped is not waited for
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"}  # file systems that another machine does not see
_PRIVATE = {"overlay", "tmpfs"}  # nor another container
_PROC = Path("/proc")
_FIRST_NAMESPACE = "pid:[4026531836]"  # of all processes of the machine; the kernel has this number fixed


def remove_abandoned_builds() -> list[str]:
    """Remove locks that are nobody's; a process that does it meanwhile is waited for.

    Returns:
        What was done, and what is left to the user, one line each.
    """
    texts = []
    for lock in _locks():
        with suppress(OSError), _alone_in(lock.parent):  # released or removed in the meantime, or not ours to remove
            if text := _look_at(lock):
                texts.append(text)
    return texts


def _locks() -> list[Path]:
    """In PyTorch's folder for operators; without the variable there is one more folder for each kind of device."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions").expanduser()
    return sorted(lock for pattern in ("*/lock", "*/*/lock") for lock in root.glob(pattern))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One of us at a time: a rank that went on to build would wait for a lock, and find nothing built when it goes."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        for _ in range(_TRIES):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_SECONDS_BETWEEN_TRIES)
                continue
            except OSError:  # not on every file system
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
    told = f"{lock} was left {age / 60:.0f} minutes ago by a build of an operator"
    if age < _MAX_BUILD_SECONDS and not (_sees_all_builds(lock) and seen.st_uid == os.getuid()):
        return (
            f"{told} that no process here runs, and this start will wait for it without end: delete the file if no "
            "other machine, container or user is building"
        )
    if os.path.samestat(seen, os.stat(lock)):
        os.unlink(lock)
    return f"{told} that was killed; the file is removed"


def _is_open_in_a_process(lock: Path) -> bool:
    """Of those that may be looked into: one's own, or all for the superuser."""
    name = str(lock.resolve())
    for process in filter(str.isdigit, os.listdir(_PROC)):
        with suppress(OSError):  # it has ended, or is another user's
            for link in os.scandir(_PROC / process / "fd"):
                with suppress(OSError):
                    if os.readlink(link) == name:
                        return True
    return False


def _sees_all_builds(lock: Path) -> bool:
    """Whether each process that could build there is one that we see."""
    try:
        mounts = [line.split()[1:3] for line in (_PROC / "self/mounts").read_text(encoding="utf-8").splitlines()]
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return False
    above = {"/", *map(str, lock.resolve().parents)}
    kind = max(((len(place), index, kind) for index, (place, kind) in enumerate(mounts) if place in above))[2]
    return kind in _PRIVATE or (kind in _LOCAL and namespace == _FIRST_NAMESPACE)
