"""A folder of checkpoints, which are written atomically: each is complete or absent.

All ranks write to `TAG.tmp`. The folder is completed by `checksums.json`, synced and renamed to `TAG`; then `latest` is
updated. A checkpoint that is being replaced is kept as `TAG.old`. So if a process is killed at any moment, no
incomplete checkpoint has the name of a tag, and the previous checkpoint exists under its own name or as `TAG.old`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import filelock

from sdp_deepspeed.atomic_files import sync, write_text
from sdp_deepspeed.checkpoint.files import CHECKSUMS, INDEX, WRITING, Checksums, read_checksums, write_checksums

LATEST, LOCK = "latest", ".lock"
REPLACED = ".old"


def check_tag(tag: str) -> None:
    """Raise ValueError for a tag that is not the name of a folder."""
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST or tag.endswith((WRITING, REPLACED)):
        raise ValueError(
            f"checkpoint tag {tag!r}: expected the name of a folder without '/' that does not begin with '.' or end in "
            f"{WRITING!r} or {REPLACED!r}"
        )


def output_folder(folder: str | Path, argument: str = "save_dir") -> Path:
    """The folder that a caller named. Raises ValueError, as DeepSpeed does, for None and "", which would be the working
    directory."""
    if not folder:
        raise ValueError(f"{argument} must be a non-empty string, got {folder!r}; pass the path of a folder")
    return Path(folder)


def lock_folder(folder: Path) -> filelock.BaseFileLock | None:
    """Create the folder and lock it, so that no other job writes to it until the lock is released or this process ends.

    Returns:
        The lock; None if the file system does not support locks.

    Raises:
        ValueError: another job holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, timeout=0, thread_local=False, is_singleton=True)
    is_first = not lock.is_locked
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"another job writes checkpoints to {folder}; use a separate folder for each job") from None
    except NotImplementedError:
        return None
    if is_first:  # remove what killed jobs left behind
        for replaced in filter(_is_ours, folder.glob(f"*{REPLACED}")):
            _restore_or_remove(replaced)
        for written in filter(_is_ours, folder.glob(f"*{WRITING}")):
            _remove(written)
    return lock


def _is_ours(path: Path) -> bool:
    """Whether a folder contains only files of a checkpoint, complete or not."""
    return path.is_dir() and all(
        file.suffix == ".distcp" or file.name.startswith((INDEX, CHECKSUMS, f".{CHECKSUMS}")) for file in path.iterdir()
    )


def _restore_or_remove(replaced: Path) -> None:
    final = replaced.with_suffix("")
    if final.exists():
        _remove(replaced)
    else:
        os.rename(replaced, final)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def create_unfinished(folder: Path, tag: str) -> Path:
    """Create an empty folder for the files of a checkpoint.

    Raises:
        ValueError: `folder / tag` exists, and is not a checkpoint.
    """
    final = folder / tag
    if final.exists() and not ((final / CHECKSUMS).is_file() or (final / INDEX).is_file()):
        raise ValueError(f"{final} is not a checkpoint, and would be replaced; use another tag")
    path = folder / f"{tag}{WRITING}"
    _remove(path)
    path.mkdir()
    return path


def publish(folder: Path, tag: str, checksums: Checksums, *, latest: bool, keep_last: int | None) -> None:
    """Complete a checkpoint, rename it, update `latest`, and remove old checkpoints.

    Args:
        keep_last: number of checkpoints to keep; None keeps all.
    """
    written, final, replaced = folder / f"{tag}{WRITING}", folder / tag, folder / f"{tag}{REPLACED}"
    write_checksums(written, checksums)
    if final.exists():
        os.rename(final, replaced)
    os.rename(written, final)
    sync(folder)
    if latest:
        write_text(folder / LATEST, tag)
    _remove(replaced)
    if keep_last is not None:
        named = _latest_tag(folder)
        for old in complete_tags(folder)[keep_last:]:
            if old != named:
                gone = folder / f"{old}{WRITING}"  # a half-deleted checkpoint must not look complete
                os.rename(folder / old, gone)
                _remove(gone)


def abandon(folder: Path, tag: str) -> None:
    """Remove an unfinished checkpoint, and restore the one that it was going to replace."""
    _remove(folder / f"{tag}{WRITING}")
    if (replaced := folder / f"{tag}{REPLACED}").exists():
        _restore_or_remove(replaced)


def path_of(folder: Path, tag: str) -> Path:
    """Current path of a checkpoint's files."""
    replaced = folder / f"{tag}{REPLACED}"
    return replaced if not (folder / tag).exists() and replaced.exists() else folder / tag


def complete_tags(folder: Path) -> list[str]:
    """Tags of complete checkpoints, newest first; their files may have been damaged since."""
    saved: set[tuple[int, str]] = set()
    for file in folder.glob(f"*/{CHECKSUMS}"):
        if file.parent.suffix != WRITING:
            try:
                saved.add((int(read_checksums(file.parent)["saved_at"]), file.parent.name.removesuffix(REPLACED)))
            except (OSError, ValueError, KeyError):
                continue
    return list(dict.fromkeys(tag for _, tag in sorted(saved, reverse=True)))


def tags_to_try(folder: Path) -> list[str]:
    """The tag in `latest`, then the other complete ones, newest first."""
    named, complete = _latest_tag(folder), complete_tags(folder)
    return complete if named is None else list(dict.fromkeys([named, *complete]))


def _latest_tag(folder: Path) -> str | None:
    """The tag in `latest`; None without the file."""
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        check_tag(tag)
    except (OSError, ValueError):
        return None
    return tag
