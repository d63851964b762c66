"""A folder of checkpoints on the disk: each complete or absent, none lost while another is written.

A checkpoint is written in a hidden folder beside its place, completed by its manifest, synced and renamed; `latest`
follows. Knows files only: neither torch nor ranks; one rank calls what writes.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular, remove_folder, staging_path, sync, write_text
from sdp_deepspeed.checkpoint.storage.errors import translated_write_errors
from sdp_deepspeed.checkpoint.storage.manifest import read_manifest, write_manifest
from sdp_deepspeed.checkpoint.storage.names import COMMON, INDEX, LATEST, MANIFEST
from sdp_deepspeed.folder_lock import LOCK, hold, is_held_by_others

_ALWAYS_WRITTEN = {MANIFEST, COMMON, INDEX}  # one of them is there after any loss of a file
_WRITING, _REPLACED, _REMOVED = "writing", "replaced", "removed"  # how names of what is hidden end


def _hidden(folder: Path, tag: str, state: str) -> Path:
    return folder / f".{tag}.{state}"


def check_tag(tag: str) -> None:
    """ValueError for a tag that is no name of a folder."""
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST:
        raise ValueError(
            f"checkpoint: tag {tag!r} must be the name of a folder, without '/' and not beginning with '.'"
        )


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Nobody else writes to the folder, which is made if it is not there: no other job until this process ends, and no
    other engine of this process inside the block.

    Raises:
        ValueError: another job has it; names it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with translated_write_errors(folder / LOCK):
        writing = hold(folder)
    with writing:
        yield


def open_staging(folder: Path, tag: str) -> Path:
    """An empty folder to write to; what killed runs left half-made is removed, and half-replaced restored.

    Raises:
        ValueError: `folder / tag` is there and is no checkpoint of ours, which the new one would replace.
    """
    restore_replaced(folder)
    _refuse_foreign(folder / tag)
    for state in (_WRITING, _REPLACED, _REMOVED):
        _remove_hidden(folder, state)
    path = staging_path(folder / tag)
    path.mkdir(parents=True)
    return path


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not (path.is_dir() and _ALWAYS_WRITTEN.intersection(os.listdir(path))):
        raise ValueError(f"checkpoint: {path} is not a checkpoint of sdp_deepspeed and would be lost; give another tag")


def abort(folder: Path, tag: str) -> None:
    """Remove what was begun and will not be completed; what it was about to replace comes back."""
    shutil.rmtree(staging_path(folder / tag), ignore_errors=True)
    with suppress(OSError):  # the error that led here is the one to tell
        restore_replaced(folder)


def restore_for_readers(folder: Path) -> None:
    """As `restore_replaced`, where no other job is about to do it, or in the middle of a replacement."""
    if any(folder.glob(f".*.{_REPLACED}")) and not is_held_by_others(folder):
        restore_replaced(folder)


def restore_replaced(folder: Path) -> None:
    """Undo replacements that were cut off between their two renames."""
    for replaced in folder.glob(f".*.{_REPLACED}"):
        path = folder / replaced.name[1 : -len(_REPLACED) - 1]
        if not path.exists():
            os.rename(replaced, path)


def _remove_hidden(folder: Path, state: str) -> None:
    for path in folder.glob(f".*.{state}"):
        remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)


def publish(folder: Path, tag: str, manifest: Mapping[str, Any], *, latest: bool) -> None:
    """Give a folder that is completely written its manifest and its name.

    Args:
        manifest: its content, with the sizes and hashes of all files under "files".
        latest: whether `latest` names it from now on.
    """
    staging, final = staging_path(folder / tag), folder / tag
    write_manifest(staging, manifest)
    sync(staging)
    replaced = _hidden(folder, tag, _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(staging, final)
    sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    if latest:
        with translated_write_errors(folder / LATEST):
            write_text(folder / LATEST, f"{tag}\n")


def find_checkpoint(path: Path, tag: str | None = None) -> Path:
    """The folder of a checkpoint.

    Args:
        path: that folder, or the one above with `latest`.

    Raises:
        ValueError: there is none.
    """
    if tag is not None:
        return path / tag
    if (path / MANIFEST).is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}")
    tags, _ = candidates(path)
    if not tags:
        raise ValueError(f"{path} has no complete checkpoint of sdp_deepspeed")
    return path / tags[0]


def broken_latest(path: Path, tag: str | None) -> str | None:
    """What is wrong with `latest` where `find_checkpoint` asks it; None if it names a checkpoint."""
    is_asked = tag is None and not (path / MANIFEST).is_file()
    return candidates(path)[1] if is_asked else None


def candidates(folder: Path) -> tuple[list[str], str | None]:
    """Tags to try in turn when none is asked for, the one that `latest` names first, then from the newest; and a remark
    if `latest` names none that is there.

    Raises:
        ValueError: `latest` may be cut short, so that it names another one.
    """
    newest = complete_tags(folder)[::-1]
    pointer = folder / LATEST
    try:
        text = _text_of_latest(folder)
    except FileNotFoundError:
        return newest, f"{pointer} is missing" if newest or _is_begun(folder) else None
    except (OSError, ValueError) as problem:
        return newest, f"{pointer} cannot be read: {problem}"
    named = text.strip()
    if named in newest:
        # Damaged ones too.
        longer = sorted(path.name for path in folder.glob(f"{glob.escape(text)}?*") if path.is_dir())
        if longer:
            raise ValueError(
                f"checkpoint: {pointer} says {text!r} without an end of the line, and there is {longer[0]!r}: it may "
                "be cut short. Give the tag, or write its name and an end of the line into that file"
            )
        return [named, *(tag for tag in newest if tag != named)], None
    try:
        read_manifest(folder / named)
        reason = "it is not a checkpoint's name"
    except (OSError, ValueError) as error:
        reason = str(error).removeprefix("checkpoint: ")
    return newest, f"{pointer} names {named!r}: {reason}"


def _text_of_latest(folder: Path) -> str:
    return regular(folder / LATEST).read_text(encoding="utf-8")


def _is_begun(folder: Path) -> bool:
    """Whether there are checkpoints, be they damaged."""
    return any(path.parent.name[0] != "." for name in _ALWAYS_WRITTEN for path in folder.glob(f"*/{name}"))


def complete_tags(folder: Path) -> list[str]:
    """Tags with a manifest, in the order in which they were written; their files may still be damaged."""
    tags = []
    for file in folder.glob(f"*/{MANIFEST}"):
        tag = file.parent.name
        try:
            manifest = read_manifest(file.parent)
            tags.append((int(manifest["saved_at"]), int(manifest["global_steps"]), tag))
        except (ValueError, KeyError, TypeError):
            continue
    return [tag for *_, tag in sorted(tags) if not tag.startswith(".")]


def prune(folder: Path, tags: Sequence[str], *, keep: int) -> None:
    """Remove all but the last `keep` of `tags`, and never what `latest` names; only after the last one is complete.
    Another thread may prune the same folder.

    Args:
        tags: from the oldest to the newest; ours, or those of stock engines.
    """
    named = None
    with suppress(OSError, ValueError):
        named = _text_of_latest(folder).strip()
    _remove_hidden(folder, _REMOVED)
    for tag in tags[:-keep]:
        if tag != named:
            removed = _hidden(folder, tag, _REMOVED)
            with suppress(FileNotFoundError):
                os.rename(folder / tag, removed)  # so that what is half removed is not taken for a damaged one
            remove_folder(removed)
