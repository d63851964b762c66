"""A folder of checkpoints, which are written atomically: each is complete or absent.

All ranks write to `TAG.tmp`. The folder is completed by `checksums.json`, synced and renamed to `TAG`; then `latest` is
updated. A checkpoint that is being replaced is kept as `TAG.old`. So if a process is killed at any moment, no
incomplete checkpoint has the name of a tag, and the previous checkpoint exists under its own name or as `TAG.old`.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import filelock
import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner

from sdp_deepspeed.atomic_files import sync, write_text

FORMAT = 2
CHECKSUMS, INDEX, LATEST, LOCK = "checksums.json", ".metadata", "latest", ".lock"
WRITING, REPLACED = ".tmp", ".old"
Checksums = dict[str, list[int]]  # size in bytes and XXH3 of each file


# ---- the folder -----------------------------------------------------------------------------------------------------


def check_tag(tag: str) -> None:
    """Raise ValueError for a tag that is not the name of a folder."""
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST or tag.endswith((WRITING, REPLACED)):
        raise ValueError(
            f"checkpoint tag {tag!r}: expected the name of a folder without '/' that does not begin with '.' or end in "
            f"{WRITING!r} or {REPLACED!r}"
        )


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
    content = {"format": FORMAT, "saved_at": time.time_ns(), "files": checksums}
    write_text(written / CHECKSUMS, json.dumps(content | {"own": _hash_of(content)}))
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


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Context with an empty folder to write to, which is renamed to `out` on success and removed on error.

    Raises:
        ValueError: `out` exists and is not an empty folder.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} already exists; use a new folder")
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
    """Read the checksum file of a checkpoint: `format`, `saved_at` (nanoseconds) and `files`.

    Raises:
        ValueError: the file is missing, damaged, or of a different format.
    """
    file = path / CHECKSUMS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        checksum, names, version = content.pop("own"), content["files"], content["format"]
        if version == FORMAT and checksum != _hash_of(content):
            raise ValueError("its checksum does not match")
        if any("/" in name for name in names) or INDEX not in names:
            raise ValueError("it lists files that a checkpoint does not have")
    except FileNotFoundError:
        raise ValueError(f"{path} is not a complete checkpoint: {CHECKSUMS} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    if version != FORMAT:
        raise ValueError(f"{file} has format {version}, expected {FORMAT}; use the version that wrote it")
    return content


def _hash_of(content: Mapping[str, Any]) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True).encode())


def problems_in(path: Path, *, rank: int = 0, size: int = 1, read: bool = True) -> list[str]:
    """Check the files of a checkpoint. Returns the problems.

    Args:
        rank, size: the share of the files to check.
        read: whether to check contents as well as sizes.
    """
    try:
        expected = sorted(read_checksums(path)["files"].items())[rank::size]
    except (OSError, ValueError) as error:
        return [str(error)]
    problems = [problem_of(path / name, sums, read=read) for name, sums in expected]
    return [problem for problem in problems if problem is not None]


def problem_of(file: Path, expected: Sequence[int], *, read: bool = True) -> str | None:
    """Check a file of a checkpoint. Returns the problem, or None.

    Args:
        expected: size in bytes and XXH3.
    """
    size, checksum = expected
    try:
        if not file.is_file():
            return f"{file} is missing"
        if (num_bytes := file.stat().st_size) != size:
            return f"{file} is damaged: it has {num_bytes} bytes, expected {size}"
        if not read:
            return None
        sum_of_file = xxhash.xxh3_64()
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                sum_of_file.update(block)
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return None if sum_of_file.intdigest() == checksum else f"{file} is damaged: its checksum does not match"


class _ChecksummedFile:
    """A file that is written sequentially, with a running checksum.

    Attributes:
        error: the OSError that occurred, if any: torch.save raises a different error in its place.
    """

    def __init__(self, path: Path) -> None:
        self.size, self.hash = 0, xxhash.xxh3_64()
        self.error: OSError | None = None
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(data)
        self.size += len(data)
        return len(data)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Sync and close; DCP closes the metadata file itself."""
        if not self._file.closed:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())


class _ChecksummedFiles(FileSystem):
    def __init__(self) -> None:
        self.checksums: Checksums = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """See DCP."""
        file = _ChecksummedFile(Path(path))
        try:
            yield file
            file.close()
        except Exception as error:
            cause = file.error or error
            raise OSError(cause.errno, cause.strerror, str(path)) if isinstance(cause, OSError) else cause from None
        self.checksums[Path(path).name.removesuffix(WRITING)] = [file.size, file.hash.intdigest()]


class Writer(FileSystemWriter):
    """DCP's writer, with a checksum of each file that this rank writes.

    Args:
        from_device: whether some tensors are on a device. If not, DCP does not initialize the GPU.
    """

    def __init__(self, path: Path, *, from_device: bool = False) -> None:
        super().__init__(path, sync_files=False, per_thread_copy_ahead=10_000_000 if from_device else 0)
        self.fs = self._files = _ChecksummedFiles()

    @property
    def checksums(self) -> Checksums:
        return self._files.checksums

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write without torch.save's own checksums, which no reader checks and which take a third of the time."""
        kept = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            return super().write_data(plan, planner)
        except OSError:
            raise
        except Exception as error:  # the error is pickled for other ranks
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        finally:
            torch.serialization.set_crc32_options(kept)

    def storage_meta(self) -> None:
        """Return None, so that no paths of this machine are stored."""


class Reader(FileSystemReader):
    """DCP's reader, without arbitrary pickles, and with file names in errors."""

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
                    raise ValueError("it refers to files in other folders")
            except Exception as error:
                raise ValueError(f"{file} is damaged: {error}") from error
        assert self.metadata is not None
        return self.metadata

    @torch.no_grad()
    def read(self, planner: LoadPlanner, state: Mapping[str, Any]) -> None:
        """Fill the boxes of a state; not collective.

        Raises:
            ValueError: a key is missing or has a different shape.
            RuntimeError: a file cannot be read; some boxes may have been filled already.
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
    """Unpickles the classes that DCP writes into its index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle enum members like this
            return _member
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(kind: type[Enum], name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"it names {name!r} of {kind!r}")
    return kind[name]
