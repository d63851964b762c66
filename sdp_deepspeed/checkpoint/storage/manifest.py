"""The manifest of a checkpoint, which vouches for its files: their sizes and hashes, written with them, verified later.

Knows files only: neither torch nor ranks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.checkpoint.storage.errors import translated_write_errors
from sdp_deepspeed.checkpoint.storage.names import COMMON, INDEX, MANIFEST, rank_file, tensors_file

FORMAT = 3
_WORTH_A_THREAD = 2**20  # bytes


class HashedFile:
    """An open file that knows its size and SHA-256."""

    def __init__(self, raw: io.FileIO) -> None:
        self.name = str(raw.name)
        self._raw = raw
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Hashed while it is written."""
        hashing = threading.Thread(target=self._digest.update, args=(data,), name="checkpoint-hash")
        if len(data) < _WORTH_A_THREAD or not _is_started(hashing):
            self._digest.update(data)
        try:
            self._write(data)
        finally:
            if hashing.ident is not None:
                hashing.join()

    def _write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._raw.write(rest) :]
        self.num_bytes += len(data)

    def record(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {"bytes": self.num_bytes, "sha256": self._digest.hexdigest()}


def _is_started(thread: threading.Thread) -> bool:
    """A process that ends begins no thread, but waits for those that run: a save may be among them."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


@contextmanager
def hashed_file(path: Path, records: dict[str, Any]) -> Iterator[HashedFile]:
    """Write `path`; its record is added to `records` when it is on the disk.

    Raises:
        RuntimeError: it cannot be written; names it and the reason.
    """
    with translated_write_errors(path), open(path, "wb", buffering=0) as raw:
        file = HashedFile(raw)
        yield file
        os.fsync(raw.fileno())
    records[path.name] = file.record()


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Complete the folder `path` of a checkpoint.

    Args:
        manifest: its content, with the records of all files under "files".

    Raises:
        RuntimeError: it cannot be written.
    """
    with hashed_file(path / MANIFEST, {}) as file:
        file.write(_render(manifest).encode())


def _render(manifest: Mapping[str, Any]) -> str:
    """One spelling for one content, with its own hash, so that no changed byte passes."""
    text = json.dumps(dict(manifest), indent=1, sort_keys=True)
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
        text = regular(file).read_text(encoding="utf-8")
        manifest = json.loads(text.rstrip("\n").rpartition("\n")[0])
    except FileNotFoundError:
        if any(path.glob("*_model_states.pt")) and not (path / COMMON).exists():
            raise ValueError(
                f"checkpoint: {path} is a checkpoint of DeepSpeed's own; convert it with `sdp checkpoint from-zero "
                f"{path.parent} <new folder> --tag {path.name}`, set checkpoint.load_universal in the config to true, "
                "and load the new folder"
            ) from None
        raise ValueError(
            f"checkpoint: {path} is not complete: it has no {MANIFEST} (or it is not a checkpoint of sdp_deepspeed)"
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise ValueError(f"checkpoint: {file} is damaged: {problem}") from None
    if not isinstance(manifest, dict) or text != _render(manifest):
        raise ValueError(f"checkpoint: {file} is damaged: its content does not have its hash")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"checkpoint: {path} has format {manifest.get('format')!r}, this version reads {FORMAT}")
    return manifest


def gaps_in(path: Path, manifest: Mapping[str, Any]) -> list[str]:
    """What a manifest must say and does not: whole, it vouches for the files of every rank that wrote one."""
    records, num_ranks = manifest.get("files"), manifest.get("ranks")
    if not isinstance(records, dict) or not isinstance(num_ranks, int) or not 0 < num_ranks <= len(records):
        return [f"{path / MANIFEST} does not name the files of all ranks"]
    of_ranks = (name for rank in range(num_ranks) for name in (rank_file(rank), tensors_file(rank)))
    return [f"{path / name} is not in its {MANIFEST}" for name in (COMMON, INDEX, *of_ranks) if name not in records]


def problem_of(path: Path, name: str, record: Any) -> str | None:
    """What is wrong with a file of a checkpoint, None if it is as it was written.

    Args:
        record: what the manifest says of it.
    """
    file = path / name
    if Path(name).name != name or not isinstance(record, dict) or record.keys() != {"bytes", "sha256"}:
        return f"{path / MANIFEST} vouches for {name!r}, which is no file beside it, or not with its size and hash"
    try:
        num_bytes = file.stat().st_size
        if num_bytes != record["bytes"]:
            return f"{file} is damaged: it has {num_bytes} bytes and was written with {record['bytes']}"
        with open(regular(file), "rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() != record["sha256"]:
                return f"{file} is damaged: its content does not have its hash"
    except FileNotFoundError:
        return f"{file} is missing"
    except OSError as problem:
        return f"{file} cannot be read: {problem.strerror or problem}"
    return None


def verify(path: Path) -> tuple[dict[str, Any], list[str]]:
    """A checkpoint's manifest, and what is wrong with its files.

    Raises:
        ValueError: there is no manifest, or it is damaged.
    """
    manifest = read_manifest(path)
    problems = gaps_in(path, manifest)
    records = manifest["files"] if isinstance(manifest.get("files"), dict) else {}
    found = (problem_of(path, name, record) for name, record in sorted(records.items()))
    return manifest, [*problems, *(problem for problem in found if problem is not None)]


def share(names: Sequence[str], rank: int, size: int) -> list[str]:
    """The files that one rank of `size` verifies."""
    return sorted(names)[rank::size]
