"""Documents of text: the standard library's source, local files, or a data set of the Hugging Face hub.

A corpus consists of parts (data/parts.py), has always the same ones, and a fingerprint that changes with its content,
so that what is made from it can be cached.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.data.config import DEFAULT_TEXT_COLUMN, DataConfig
from sdp_deepspeed.data.files import LocalFiles, LocalParquet, find_files
from sdp_deepspeed.data.hub import HubDataset
from sdp_deepspeed.data.parts import Part, documents_of, grouped

# Tests repeat themselves, codec tables and vendored packages are no prose; generated files are longer than this.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
_LONGEST_SOURCE_FILE = 400_000


class Corpus(Protocol):
    """Parts in a fixed order, that of files by name."""

    def fingerprint(self) -> str:
        """Changes when the documents may have changed."""
        ...

    def parts(self) -> Sequence[Part]:
        """All of it; reads no text, but may ask files and the hub what they hold."""
        ...


@dataclass(frozen=True)
class SourceFiles:
    """A part of the standard library."""

    paths: tuple[Path, ...]
    size: int

    def documents(self) -> Iterator[str]:
        for path in self.paths:
            source = regular(path).read_bytes()
            if len(source) > _LONGEST_SOURCE_FILE:
                continue
            try:
                text = source.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield text


@dataclass(frozen=True)
class StandardLibrary:
    """The .py files of the running interpreter's standard library, sorted by path; a file is a document."""

    root: Path

    def parts(self) -> list[SourceFiles]:
        return [SourceFiles(paths, size) for paths, size in grouped(sorted(self._paths()))]

    def _paths(self) -> Iterator[Path]:
        """Does not go into folders that are skipped: installed packages are many more files."""
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
            yield from (Path(folder, name) for name in names if name.endswith(".py"))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for text in documents_of(self.parts()):
            digest.update(hashlib.sha256(text.encode("utf-8")).digest())
        return f"stdlib:{digest.hexdigest()}"


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config` describes; reads no document yet.

    Raises:
        ValueError: a path without files, or files of several kinds.
    """
    if config.source == "stdlib":
        return StandardLibrary(Path(sysconfig.get_path("stdlib")))
    if config.source == "files":
        files = find_files(config.path or "")
        kind = LocalParquet if files.reader == "parquet" else LocalFiles
        return kind(files, config.text_column, config.text_documents)
    return HubDataset(
        name=config.path or "",
        subset=config.subset,
        split=config.split or "train",
        revision=config.revision,
        text_column=config.text_column or DEFAULT_TEXT_COLUMN,
        streaming=config.streaming is not False,
    )
