"""Files of a checkpoint: PyTorch's distributed checkpoint (DCP) with a checksum of each file, read without arbitrary
pickles."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlan, SavePlanner

from sdp_deepspeed.atomic_files import write_text

FORMAT = 2
CHECKSUMS, INDEX = "checksums.json", ".metadata"
WRITING = ".tmp"
Checksums = dict[str, list[int]]  # size in bytes and XXH3 of each file


def write_checksums(path: Path, checksums: Checksums) -> None:
    """Write the checksum file, which completes a checkpoint."""
    content = {"format": FORMAT, "saved_at": time.time_ns(), "files": checksums}
    write_text(path / CHECKSUMS, json.dumps(content | {"own": _hash_of(content)}))


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
