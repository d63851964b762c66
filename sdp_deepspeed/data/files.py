"""Local .txt, .jsonl and .parquet files as documents; the first two are read through `datasets`."""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sdp_deepspeed.data.config import DEFAULT_TEXT_COLUMN
from sdp_deepspeed.data.parts import Part, grouped
from sdp_deepspeed.data.row_groups import row_groups_of
from sdp_deepspeed.data.rows import column_of

# File suffix -> name of the reader in `datasets`.
_READERS = {".txt": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".xz"}
# Our word for what is one document of a text file -> that of `datasets`.
_TEXT_DOCUMENTS = {"file": "document", "paragraph": "paragraph", "line": "line"}


@dataclass(frozen=True)
class FoundFiles:
    """Files of one kind under one root, sorted by name."""

    root: Path
    reader: str
    paths: tuple[Path, ...]


def find_files(path: str) -> FoundFiles:
    """The readable files that `path` (a file, a folder or a glob) means.

    Raises:
        ValueError: there are none, or of several kinds, or a folder cannot be read.
    """
    given = Path(path).expanduser()
    if given.is_file():
        if _reader(given) is None:
            raise ValueError(f"path {path!r}: cannot tell the kind of file, expected one of {_suffixes()}")
        paths, root = [given], given.parent
    elif given.is_dir():
        paths, root = [p for p in _below(given) if _reader(p) and p.is_file()], given
    else:
        paths = [p for p in map(Path, glob.glob(str(given), recursive=True)) if p.is_file() and _reader(p)]
        root = Path(*_fixed_parts(given))
    if not paths:
        raise ValueError(
            f"path {path!r}: no file found, expected a file, folder or glob of {_suffixes()} (seen from {Path.cwd()})"
        )
    return FoundFiles(root, _only_reader(path, paths), tuple(sorted(paths)))


def _suffixes() -> str:
    return f"{', '.join(_READERS)} (text and JSON also compressed: {', '.join(sorted(_COMPRESSED))})"


def _reader(path: Path) -> str | None:
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return _READERS.get(name.suffix)


def _below(folder: Path) -> Iterator[Path]:
    """Not what download tools leave in hidden folders beside the data; ValueError for a folder that cannot be read,
    whose text would be missing without a word."""

    def stop(error: OSError) -> NoReturn:
        raise ValueError(
            f"path {str(folder)!r}: the folder {error.filename} cannot be read ({error.strerror}): make it readable, "
            "or name the files beside it with a glob"
        )

    for here, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _fixed_parts(pattern: Path) -> list[str]:
    parts = list(pattern.parts)
    first = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return parts[:first]


def _only_reader(path: str, paths: list[Path]) -> str:
    counts = Counter(_reader(p) for p in paths)
    if len(counts) > 1:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), key=str))
        raise ValueError(
            f"path {path!r}: files of several kinds ({kinds}), expected one kind: narrow it with a glob such as "
            "'<folder>/**/*.parquet'"
        )
    return str(next(iter(counts)))


@dataclass(frozen=True)
class TextRows:
    """Some of the files, one after the other, so that an error names the file and few are open at a time."""

    reader: str
    paths: tuple[Path, ...]
    size: int
    column: str
    text_documents: str | None

    def documents(self) -> Iterator[str]:
        for path in self.paths:
            yield from column_of(lambda path=path: self._load(path), self.column, where=str(path))  # type: ignore[misc]

    def _load(self, path: Path) -> Any:
        import datasets

        options = {"sample_by": _TEXT_DOCUMENTS[self.text_documents or "file"]} if self.reader == "text" else {}
        # Streamed, since `datasets` would else write a second copy of the whole corpus to its cache.
        return datasets.load_dataset(
            self.reader, data_files=glob.escape(str(path)), split="train", streaming=True, **options
        )


@dataclass(frozen=True)
class LocalFiles:
    """Documents of local files; a row is a document, of .txt files what `text_documents` says.

    Raises:
        ValueError: a setting that files of this kind would not read.
    """

    files: FoundFiles
    text_column: str | None = None
    text_documents: str | None = None

    def __post_init__(self) -> None:
        unread = "text_column" if self.files.reader == "text" else "text_documents"
        if getattr(self, unread) is not None:
            raise ValueError(f"{unread} has no effect on {self.files.paths[0].name!r}: drop it")

    def parts(self) -> Sequence[Part]:
        """Small files together, a large one alone. Empty ones are no mistake, but `datasets` fails on them."""
        column = self.text_column or DEFAULT_TEXT_COLUMN
        return [
            TextRows(self.files.reader, paths, size, column, self.text_documents)
            for paths, size in grouped(p for p in self.files.paths if p.stat().st_size > 0)
        ]

    def fingerprint(self) -> str:
        # By name, size and time: reading terabytes to look into a cache would defeat it.
        digest = hashlib.sha256()
        for path in self.files.paths:
            stat = path.stat()
            name = path.relative_to(self.files.root) if path.is_relative_to(self.files.root) else path
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return f"files:{self.files.reader}:{self.text_column}:{self.text_documents}:{digest.hexdigest()}"


@dataclass(frozen=True)
class LocalParquet(LocalFiles):
    """Parquet files, such as a mirror of FineWeb's: their row groups can be read one by one."""

    def parts(self) -> Sequence[Part]:
        column = self.text_column or DEFAULT_TEXT_COLUMN
        return row_groups_of([str(path) for path in self.files.paths], column)
