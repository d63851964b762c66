"""Files and folders that are complete or absent: written beside their place, synced, renamed.

What is not yet complete lies in a hidden staging path beside its place. An error removes it; what a killed process left
there is removed by the next writer. Only regular files are read: from a device or a pipe reading may never end.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sdp_deepspeed.folder_lock import flock
from sdp_deepspeed.lock_owner import machine

_DAY = 24 * 3600.0


def regular(path: Path) -> Path:
    """`path`, which is to be read.

    Raises:
        OSError: it is not there, or neither a file nor a link to one.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is a device, a pipe or a folder, expected a file", str(path))
    return path


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
    if not concurrent and is_taken(out):
        raise ValueError(f"{out} is there already; give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(out.parent, glob.escape(out.name))
    with _staging_folder(out.parent, out.name) as staging:
        yield staging
        _sync_all(staging)
        try:
            os.rename(staging, out)
        except OSError:
            if not out.is_dir():
                raise
            if not concurrent:
                raise ValueError(f"{out} was made by another process in the meantime; give a new folder") from None
            shutil.rmtree(staging)
        sync(out.parent)


@contextmanager
def added_when_complete(folder: Path, *, last: str, replaces: Callable[[str], bool]) -> Iterator[Path]:
    """An empty folder to write to, whose files come to `folder` when the block ends well; an error leaves `folder` as
    it was. Other files in it stay.

    Args:
        last: the file without which the others are not found; it goes first and comes last, so that a process that is
            killed in between leaves nothing that looks complete.
        replaces: whether a file that is there, by its name, belongs to what is replaced and goes.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not is_taken(folder):
        with complete_or_absent(folder) as staging:
            yield staging
        return
    remove_abandoned(folder, glob.escape(folder.name))
    with _staging_folder(folder, folder.name) as staging:  # inside: on the same disk, whatever is mounted there
        yield staging
        _sync_all(staging)
        written = {path.name for path in staging.iterdir()}
        (folder / last).unlink(missing_ok=True)
        sync(folder)
        _remove_files(folder, {path.name for path in folder.iterdir() if replaces(path.name)} - written)
        for name in sorted(written, key=lambda name: name == last):
            _move(staging / name, folder / name)
        sync(folder)
        staging.rmdir()


def is_taken(path: Path) -> bool:
    """Whether something is there, other than an empty folder."""
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _move(source: Path, target: Path) -> None:
    """A file, or what is in a folder."""
    if not source.is_dir():
        os.replace(source, target)
        return
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        _move(path, target / path.name)
    source.rmdir()


def _remove_files(folder: Path, names: Collection[str]) -> None:
    for name in names:
        if (folder / name).is_file():
            (folder / name).unlink()


@contextmanager
def _staging_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder of this process alone, locked while it works in it, so that others see whether it is alive."""
    staging = parent / f".{name}.{machine()}.{uuid.uuid4().hex}.writing"
    unlocked = staging.with_suffix(".new")  # has its name when it is locked, or others might take it for abandoned
    unlocked.mkdir()
    handle = os.open(unlocked, os.O_RDONLY)
    try:
        flock(handle)
        os.rename(unlocked, staging)
        yield staging
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(handle)


def remove_abandoned(parent: Path, name: str) -> None:
    """Remove staging folders of processes that are gone: of this machine at once, of others when they were not touched
    for a day.

    Args:
        name: of what they were to become, or a pattern of it.
    """
    for staging in parent.glob(f".{name}.*.writing"):
        with suppress(OSError):  # removed by another process, or not ours to remove
            handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
            try:
                is_here = flock(handle) and f".{machine()}." in staging.name
                if is_here or time.time() - _last_change(staging) > _DAY:
                    shutil.rmtree(staging)
            finally:
                os.close(handle)


def _last_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))


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


def _sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        sync(path)


def sync(path: Path) -> None:
    """Until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
