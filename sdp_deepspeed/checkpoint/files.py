"""A folder of checkpoints: each complete or absent, none lost while another is written.

A checkpoint is written to `TAG.tmp` by all ranks, completed by `checksums.json`, synced and renamed to `TAG`; `latest`
follows. One that is replaced is `TAG.old` in the meantime. So a process that is killed at any moment leaves nothing
incomplete under the name of a tag, and the last checkpoint under its own or as `TAG.old`.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import filelock
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner

from sdp_deepspeed.atomic_files import sync, write_text

FORMAT = 1
CHECKSUMS, INDEX, LATEST, LOCK = "checksums.json", ".metadata", "latest", ".lock"
WRITING, REPLACED = ".tmp", ".old"
Checksums = dict[str, list[int]]  # bytes and CRC-32 of each file


# ---- the folder -----------------------------------------------------------------------------------------------------


def check_tag(tag: str) -> None:
    """ValueError for a tag that is no name of a folder."""
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST or tag.endswith((WRITING, REPLACED)):
        raise ValueError(
            f"checkpoint tag {tag!r}: expected the name of a folder, without '/', not beginning with '.' nor ending in "
            f"{WRITING!r} or {REPLACED!r}"
        )


def lock_folder(folder: Path) -> filelock.BaseFileLock | None:
    """Make the folder, and take its lock: no other job writes to it until the lock is released or forgotten, or this
    process ends.

    Returns:
        None where the file system knows no locks.

    Raises:
        ValueError: another job has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, timeout=0, thread_local=False, is_singleton=True)
    is_first = not lock.is_locked
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"another job writes checkpoints to {folder}; give each job a folder of its own") from None
    except NotImplementedError:
        return None
    if is_first:  # what killed jobs left behind
        for replaced in filter(_is_ours, folder.glob(f"*{REPLACED}")):
            _restore_or_remove(replaced)
        for written in filter(_is_ours, folder.glob(f"*{WRITING}")):
            _remove(written)
    return lock


def _is_ours(path: Path) -> bool:
    """Whether a folder has files of a checkpoint, complete or not, and no others."""
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


def open_new(folder: Path, tag: str) -> Path:
    """An empty folder for the files of a checkpoint.

    Raises:
        ValueError: `folder / tag` is there and no checkpoint, and would be lost.
    """
    final = folder / tag
    if final.exists() and not ((final / CHECKSUMS).is_file() or (final / INDEX).is_file()):
        raise ValueError(f"{final} is no checkpoint and would be replaced; give another tag")
    path = folder / f"{tag}{WRITING}"
    _remove(path)
    path.mkdir()
    return path


def publish(folder: Path, tag: str, checksums: Checksums, *, latest: bool, keep_last: int | None) -> None:
    """Complete a written checkpoint and give it its name; then `latest` names it, and old ones go.

    Args:
        checksums: of all its files.
        keep_last: number of checkpoints that stay; None keeps all.
    """
    written, final, replaced = folder / f"{tag}{WRITING}", folder / tag, folder / f"{tag}{REPLACED}"
    content = {"format": FORMAT, "saved_at": time.time_ns(), "files": checksums}
    write_text(written / CHECKSUMS, json.dumps(content | {"own": _crc_of(content)}))
    if final.exists():
        os.rename(final, replaced)
    os.rename(written, final)
    sync(folder)
    if latest:
        write_text(folder / LATEST, tag)
    _remove(replaced)
    if keep_last is not None:
        named = _named(folder)
        for old in complete_tags(folder)[keep_last:]:
            if old != named:
                gone = folder / f"{old}{WRITING}"  # so that nobody takes a half for a whole
                os.rename(folder / old, gone)
                _remove(gone)


def abandon(folder: Path, tag: str) -> None:
    """Remove what was begun and will not be completed; what it was about to replace comes back."""
    _remove(folder / f"{tag}{WRITING}")
    if (replaced := folder / f"{tag}{REPLACED}").exists():
        _restore_or_remove(replaced)


def path_of(folder: Path, tag: str) -> Path:
    """Where a checkpoint's files are now."""
    replaced = folder / f"{tag}{REPLACED}"
    return replaced if not (folder / tag).exists() and replaced.exists() else folder / tag


def complete_tags(folder: Path) -> list[str]:
    """Tags of complete checkpoints, the newest first; their files may have been damaged since."""
    found = set()
    for file in folder.glob(f"*/{CHECKSUMS}"):
        if file.parent.suffix != WRITING:
            try:
                found.add((int(read_checksums(file.parent)["saved_at"]), file.parent.name.removesuffix(REPLACED)))
            except (OSError, ValueError, KeyError):
                continue
    return list(dict.fromkeys(tag for _, tag in sorted(found, reverse=True)))


def tags_to_try(folder: Path) -> list[str]:
    """The tag that `latest` names, then complete ones from the newest."""
    named, complete = _named(folder), complete_tags(folder)
    return complete if named is None else list(dict.fromkeys([named, *complete]))


def _named(folder: Path) -> str | None:
    """What `latest` names, if it is there."""
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
        check_tag(tag)
    except (OSError, ValueError):
        return None
    return tag


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """An empty folder to write to, which becomes `out` when the block ends well, and goes when it does not.

    Raises:
        ValueError: `out` is there already and not an empty folder.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} is there already; give a new folder")
    written = out.with_name(f"{out.name}{WRITING}")
    _remove(written)
    written.mkdir(parents=True)
    try:
        yield written
        for path in (*written.iterdir(), written):
            sync(path)
        os.rename(written, out)
    except BaseException:
        _remove(written)
        raise
    sync(out.parent)


# ---- checksums ------------------------------------------------------------------------------------------------------


def read_checksums(path: Path) -> dict[str, Any]:
    """`format`, `saved_at` (nanoseconds) and `files` of a checkpoint.

    Raises:
        ValueError: the file is missing or damaged, or of another format.
    """
    file = path / CHECKSUMS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        own, names, found = content.pop("own"), content["files"], content["format"]
        if own != _crc_of(content) or any("/" in name for name in names) or INDEX not in names:
            raise ValueError("its checksum is not the one it was written with")
    except FileNotFoundError:
        raise ValueError(f"{path} is no complete checkpoint: {CHECKSUMS} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    if found != FORMAT:
        raise ValueError(f"{file} has format {found}, expected {FORMAT}; use the version that wrote it")
    return content


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def problems_in(path: Path, *, rank: int = 0, size: int = 1, read: bool = True) -> list[str]:
    """What is wrong with a checkpoint.

    Args:
        rank, size: which share of the files is looked at.
        read: whether their content is looked at, and not their sizes alone.
    """
    try:
        found = sorted(read_checksums(path)["files"].items())[rank::size]
    except (OSError, ValueError) as error:
        return [str(error)]
    return [text for name, sums in found if (text := problem_of(path / name, sums, read=read)) is not None]


def problem_of(file: Path, expected: Sequence[int], *, read: bool = True) -> str | None:
    """What is wrong with a file of a checkpoint.

    Args:
        expected: bytes and CRC-32.
    """
    size, checksum = expected
    try:
        if not file.is_file():
            return f"{file} is missing"
        if (found := file.stat().st_size) != size:
            return f"{file} is damaged: it has {found} bytes and was written with {size}"
        if not read:
            return None
        with file.open("rb") as stream:
            crc = 0
            while block := stream.read(2**22):
                crc = zlib.crc32(block, crc)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return None if crc == checksum else f"{file} is damaged: its checksum is not the one it was written with"


class _ChecksummedFile:
    """A file that is written from start to end.

    Attributes:
        error: of the system, where there was one: torch.save raises another in its place.
    """

    def __init__(self, path: Path) -> None:
        self.size = self.crc = 0
        self.error: OSError | None = None
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.crc, self.size = zlib.crc32(data, self.crc), self.size + len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Sync and close; DCP closes the file of metadata itself."""
        if not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())


class _ChecksummedFiles(FileSystem):
    def __init__(self) -> None:
        self.checksums: Checksums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """
        Raises:
            OSError: with the name of the file.
        """
        file = _ChecksummedFile(Path(path))
        try:
            yield file
            file.close()
        except Exception as error:
            cause = file.error or error
            raise OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else cause from None
        self.checksums[Path(path).name.removesuffix(WRITING)] = [file.size, file.crc]


class Writer(FileSystemWriter):
    """DCP's, with a checksum of each file that this rank has written.

    Args:
        from_device: whether tensors are not in host memory; if all are, DCP starts no GPU to copy them.
    """

    def __init__(self, path: Path, *, from_device: bool = False) -> None:
        super().__init__(path, sync_files=False, per_thread_copy_ahead=10_000_000 if from_device else 0)
        self.fs = self._files = _ChecksummedFiles()

    @property
    def checksums(self) -> Checksums:
        return self._files.checksums

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """torch.save's own checksums, which no reader looks at, are left out: together they would cost a third."""
        kept = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        except OSError:
            raise
        except Exception as error:  # other ranks get it as a pickle
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        finally:
            torch.serialization.set_crc32_options(kept)

    def storage_meta(self) -> None:
        """Nothing of this machine's paths is stored."""


class Reader(FileSystemReader):
    """DCP's, without arbitrary pickles; an error names its file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            file = Path(self.path) / INDEX
            try:
                with file.open("rb") as stream:
                    self.metadata = _IndexUnpickler(stream).load()
                if any("/" in info.relative_path for info in self.metadata.storage_data.values()):
                    raise ValueError("it names files of other folders")
            except Exception as error:
                raise ValueError(f"{file} is damaged: {error}") from error
        assert self.metadata is not None
        return self.metadata

    @torch.no_grad()
    def read(self, planner: LoadPlanner, state: Mapping[str, Any]) -> None:
        """Fill the boxes of a state. No collective.

        Raises:
            ValueError: a key is missing or has another shape.
            RuntimeError: a file cannot be read; some boxes may have been filled.
        """
        planner.set_up_planner(dict(state), self.read_metadata())
        self.set_up_storage_reader(self.read_metadata(), is_coordinator=False)
        plan = planner.create_local_plan()
        files: dict[str, list[Any]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            try:
                self.read_data(replace(plan, items=items), planner).wait()
            except Exception as error:
                raise RuntimeError(f"{Path(self.path) / name} cannot be read: {error}") from error


_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _IndexUnpickler(pickle.Unpickler):
    """Reads what DCP writes into its index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how some releases of Python 3.11 pickle the member of an enum
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(kind: type[Enum], name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it names {name!r} of {kind!r}")
    return kind[name]
