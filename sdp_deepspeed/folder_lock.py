"""One job at a time writes to a folder. Its lock ends with the process, however that ends, and names its owner.

On one machine the kernel's lock (`flock`) decides, and a killed process has none any more. It need not reach another
machine, so an owner touches the lock's file again and again; one there that stopped to do so is taken for dead.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import pwd
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from sdp_deepspeed.lock_owner import Owner, machine

LOCK = ".lock"
BEAT_SECONDS = 15.0
DEAD_SECONDS = 60.0  # without a beat; several would have been missed
LONG_DEAD_SECONDS = 600.0  # clocks of machines differ by less
_TRIES, _SECONDS_BETWEEN_TRIES = 3, 0.1

log = logging.getLogger(__name__)


def flock(handle: int) -> bool:
    """Lock an open file until it is closed.

    Returns:
        Whether the file system has such locks.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


class FolderInUseError(ValueError):
    """Another job has the folder; the message names it."""


@dataclass
class _Held:
    """Of this process.

    Args:
        handle: of the lock's file, which is open.
        writing: held by one of several writers of this process.
    """

    path: Path
    handle: int
    writing: threading.Lock

    def is_there(self) -> bool:
        """Whether the folder is still the one that was locked, not removed and made anew."""
        return _is_at(self.handle, self.path)


_held: dict[Path, _Held] = {}
_changing = threading.Lock()


def hold(folder: Path) -> threading.Lock:
    """Keep other jobs out of a folder, which exists, until this process ends.

    Returns:
        A lock for the writers of this process among themselves.

    Raises:
        FolderInUseError: another job has it.
        ValueError: its lock is no file, or another user's that cannot be removed.
        OSError: it cannot be written to.
    """
    with _changing:
        key = folder.resolve()
        held = _held.get(key)
        if held is not None and held.is_there():
            return held.writing
        new = _Held(key / LOCK, _take(key / LOCK), held.writing if held is not None else threading.Lock())
        if held is not None:
            os.close(held.handle)
        _held[key] = new
        _beat_from_now_on()
        return new.writing


def is_held_by_others(folder: Path) -> bool:
    """Whether another job seems to have the folder. For readers: takes nothing, and waits for nothing.

    Raises:
        ValueError: its lock is no file.
    """
    held = _held.get(folder.resolve())
    if held is not None and held.is_there():
        return False
    try:
        handle = _open(folder / LOCK, os.O_RDONLY)
    except PermissionError:  # another user's, of whom nothing can be seen
        return True
    except OSError:
        return False
    try:
        decides = flock(handle)
        owner = _owner(handle)
        return owner is not None and not (decides and owner.machine == machine()) and _age(handle) < LONG_DEAD_SECONDS
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def _take(path: Path) -> int:
    """The lock's file, open and ours."""
    while True:
        handle, is_ours = _open_to_take(path)
        try:
            decides = _flock_patiently(path, handle)
            if _is_at(handle, path):
                owner = _owner(handle)
                if owner is not None and not (decides and owner.machine == machine()):
                    _wait_for_a_beat(path, handle, owner)
                if is_ours:
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(asdict(Owner.here())).encode(), 0)
                    return handle
                with _naming_user_of(path, "removed"):
                    path.unlink()
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # it was removed, by its owner or here


def _open(path: Path, flags: int) -> int:
    """Opening a pipe might never end, and of a link somebody's file would be overwritten."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise ValueError(f"{path} is no file, as the lock of this folder must be: remove it")
    return os.open(path, flags, 0o644)


def _open_to_take(path: Path) -> tuple[int, bool]:
    """The lock's file, and whether it may be written: one that another user left may be read only, and removed."""
    try:
        return _open(path, os.O_RDWR | os.O_CREAT), True
    except PermissionError:
        if not path.exists():
            raise
    with _naming_user_of(path, "read"):
        return _open(path, os.O_RDONLY), False


@contextlib.contextmanager
def _naming_user_of(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except PermissionError:
        raise ValueError(
            f"{path} is a lock of {_user_of(path)}, and cannot be {what} here: have them remove it if no job "
            "of theirs writes to the folder, or take another folder"
        ) from None


def _user_of(path: Path) -> str:
    try:
        user = path.stat().st_uid
    except OSError:  # gone meanwhile
        return "somebody else"
    try:
        return f"the user {pwd.getpwuid(user).pw_name}"
    except KeyError:  # a machine, or container, that does not know them
        return f"the user {user}"


def _flock_patiently(path: Path, handle: int) -> bool:
    """As `flock`; readers have it for a moment each.

    Raises:
        FolderInUseError: another job has it.
    """
    for _ in range(_TRIES):
        try:
            return flock(handle)
        except BlockingIOError:
            time.sleep(_SECONDS_BETWEEN_TRIES)
    raise _in_use(path.parent, _owner(handle))


def _wait_for_a_beat(path: Path, handle: int, owner: Owner) -> None:
    """Until an owner that cannot be seen from here has shown no life for long enough.

    Raises:
        FolderInUseError: it did.
    """
    if _age(handle) > LONG_DEAD_SECONDS:
        return
    log.warning(f"{path.parent} was in use by {owner}: waiting {DEAD_SECONDS:.0f} s to see whether it still is")
    last, until = os.fstat(handle).st_mtime_ns, time.monotonic() + DEAD_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, DEAD_SECONDS / 10))
        with path.open("rb") as seen:  # opened anew: network file systems remember the times of an open file
            if os.fstat(seen.fileno()).st_mtime_ns != last:
                raise _in_use(path.parent, owner)


def _in_use(folder: Path, owner: Owner | None) -> FolderInUseError:
    return FolderInUseError(
        f"{folder} is in use by {owner or 'another process'}: wait until it has ended (it may still be saving), end "
        "it, or take another folder"
    )


def _owner(handle: int) -> Owner | None:
    return Owner.read(os.pread(handle, 10_000, 0).decode("utf-8", "replace"))


def _age(handle: int) -> float:
    return time.time() - os.fstat(handle).st_mtime


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


@cache
def _beat_from_now_on() -> None:
    """Once in a process."""
    threading.Thread(target=_beat, name="folder-lock", daemon=True).start()


def _beat() -> None:
    while True:
        time.sleep(BEAT_SECONDS)
        for held in list(_held.values()):
            with contextlib.suppress(OSError):
                os.utime(held.handle)


def release_all() -> None:
    """At the end of the process: nobody has to find out that it has ended."""
    for held in _held.values():
        with contextlib.suppress(OSError):
            if held.is_there():
                held.path.unlink()
            os.close(held.handle)
    _held.clear()


def _forget_in_child() -> None:
    """The lock would live as long as any process that has the file open."""
    for held in _held.values():
        with contextlib.suppress(OSError):
            os.close(held.handle)
    _held.clear()
    _beat_from_now_on.cache_clear()


atexit.register(release_all)
os.register_at_fork(after_in_child=_forget_in_child)
