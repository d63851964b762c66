"""A folder of checkpoints on the disk: each complete or absent, verified by its manifest (DESIGN.md section 6).

Written aside, synced, renamed, `latest` last. Knows files only: neither torch nor ranks; one rank calls what writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import sync

FORMAT = 3
MANIFEST = "manifest.json"
LATEST = "latest"
_OURS = {MANIFEST, "common.pt", "tensors.json"}  # one of them is there after any loss of a file
_WRITING, _REPLACED, _REMOVED = "writing", "replaced", "removed"


def aside(folder: Path, tag: str, state: str = _WRITING) -> Path:
    """Where a checkpoint is while it is not (or no longer) there."""
    return folder / f".{tag}.{state}"


def check_tag(tag: str) -> None:
    """ValueError for a tag that is no name of a folder."""
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST:
        raise ValueError(
            f"checkpoint: tag {tag!r} must be the name of a folder, without '/' and not beginning with '.'"
        )


def prepare(folder: Path, tag: str) -> Path:
    """An empty folder to write to; what killed runs left half-made is removed, and half-replaced brought back.

    Raises:
        ValueError: `folder / tag` is there and is no checkpoint of ours, which the new one would replace.
    """
    bring_back(folder)
    _refuse_foreign(folder / tag)
    for left in _left_over(folder):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    path = aside(folder, tag)
    path.mkdir(parents=True)
    return path


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not (path.is_dir() and _OURS.intersection(os.listdir(path))):
        raise ValueError(f"checkpoint: {path} is not a checkpoint of sdp_deepspeed and would be lost; give another tag")


def discard(folder: Path, tag: str) -> None:
    """Remove what was begun and will not be completed; what it was about to replace comes back."""
    shutil.rmtree(aside(folder, tag), ignore_errors=True)
    with suppress(OSError):  # the error that led here is the one to tell
        aside(folder, LATEST).unlink(missing_ok=True)
        bring_back(folder)


def bring_back(folder: Path) -> None:
    """Undo replacements that were cut off between their two renames."""
    for replaced in folder.glob(f".*.{_REPLACED}"):
        path = folder / replaced.name[1 : -len(_REPLACED) - 1]
        if not path.exists():
            os.rename(replaced, path)


def _left_over(folder: Path) -> Iterator[Path]:
    for state in (_WRITING, _REPLACED, _REMOVED):
        yield from folder.glob(f".*.{state}")


def publish(folder: Path, tag: str, facts: Mapping[str, Any], *, latest: bool) -> None:
    """Give a folder that is completely written its manifest and its name.

    Args:
        facts: content of the manifest, with the sizes and hashes of all files under "files".
        latest: whether `latest` names it from now on.
    """
    path, final = aside(folder, tag), folder / tag
    _write_synced(path / MANIFEST, _render(facts))
    sync(path)
    replaced = aside(folder, tag, _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(final, replaced)
    os.rename(path, final)
    sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    if latest:
        pointer = folder / f".{LATEST}.{_WRITING}"
        _write_synced(pointer, tag)
        os.replace(pointer, folder / LATEST)
        sync(folder)


def _write_synced(path: Path, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:  # where a disk is full the error does not name the file
        reason = f"cannot write {path}: {problem.strerror}; earlier checkpoints are intact"
        raise OSError(problem.errno, reason) from problem


def _render(facts: Mapping[str, Any]) -> str:
    """One spelling for one content, with its own hash, so that no changed byte passes."""
    text = json.dumps(dict(facts), indent=1, sort_keys=True)
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """Of the checkpoint `path`.

    Raises:
        ValueError: there is none, it is damaged, or it is of another format.
    """
    file = path / MANIFEST
    if not path.is_dir():
        raise ValueError(f"checkpoint: there is no folder {path}; give a tag that was saved, or none for the latest")
    try:
        text = file.read_text(encoding="utf-8")
        facts = json.loads(text.rstrip("\n").rpartition("\n")[0])
    except FileNotFoundError:
        raise ValueError(
            f"checkpoint: {path} is not complete: it has no {MANIFEST} (or it is not a checkpoint of sdp_deepspeed)"
        ) from None
    except (OSError, ValueError) as problem:
        raise ValueError(f"checkpoint: {file} is damaged: {problem}") from None
    if not isinstance(facts, dict) or text != _render(facts):
        raise ValueError(f"checkpoint: {file} is damaged: its content does not have its hash")
    if facts.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {facts.get('format')!r}, this version reads {FORMAT}")
    return facts


def problem_of(path: Path, name: str, record: Mapping[str, Any]) -> str | None:
    """What is wrong with a file of a checkpoint, None if it is as it was written.

    Args:
        record: what the manifest says of it.
    """
    file = path / name
    try:
        found = file.stat().st_size
        if found != record["bytes"]:
            return f"{file} is damaged: it has {found} bytes and was written with {record['bytes']}"
        with open(file, "rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != record["sha256"]:
                return f"{file} is damaged: its content does not have its hash"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as problem:
        return f"{file} cannot be read: {problem.strerror or problem}"
    return None


def candidates(folder: Path) -> tuple[list[str], str | None]:
    """Tags to try in turn when none is asked for, the one that `latest` names first, then from the newest; and a remark
    if `latest` names none that is there."""
    newest = _complete(folder)[::-1]
    pointer = folder / LATEST
    try:
        named = pointer.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return newest, f"{pointer} is missing" if newest or _is_begun(folder) else None
    except (OSError, ValueError) as problem:
        return newest, f"{pointer} cannot be read: {problem}"
    if named in newest:
        return [named, *(tag for tag in newest if tag != named)], None
    try:
        read_manifest(folder / named)
        reason = "it is not a checkpoint's name"
    except (OSError, ValueError) as error:
        reason = str(error).removeprefix("checkpoint: ")
    return newest, f"{pointer} names {named!r}: {reason}"


def _is_begun(folder: Path) -> bool:
    """Whether there are checkpoints, be they damaged."""
    return any(path.parent.name[0] != "." for name in _OURS for path in folder.glob(f"*/{name}"))


def _complete(folder: Path) -> list[str]:
    """Tags with a manifest, in the order in which they were written; their files may still be damaged."""
    found = []
    for file in folder.glob(f"*/{MANIFEST}"):
        tag = file.parent.name
        try:
            facts = read_manifest(file.parent)
            found.append((int(facts["saved_at"]), int(facts["global_steps"]), tag))
        except (ValueError, KeyError, TypeError):
            continue
    return [tag for *_, tag in sorted(found) if not tag.startswith(".")]


def prune(folder: Path, keep: int, current: str) -> None:
    """Remove all but the newest `keep` checkpoints, and never `current` or what `latest` names; only after `current` is
    complete."""
    named = ""
    with suppress(OSError, ValueError):
        named = (folder / LATEST).read_text(encoding="utf-8").strip()
    tags = [tag for tag in _complete(folder) if tag not in (current, named)]
    for tag in tags[: max(0, len(tags) - (keep - 1))]:
        removed = aside(folder, tag, _REMOVED)
        shutil.rmtree(removed, ignore_errors=True)
        os.rename(folder / tag, removed)  # so that what is half removed is not taken for a damaged one
        shutil.rmtree(removed)


def share(names: Sequence[str], rank: int, size: int) -> list[str]:
    """The files that one rank of `size` verifies."""
    return sorted(names)[rank::size]
