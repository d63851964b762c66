"""Documents of text: the standard library's source, local files, or a data set of the Hugging Face hub.

A corpus can be read again and again, always in the same order, and has a fingerprint that changes with
its content, so that what is made from it can be cached.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.data.config import DEFAULT_TEXT_COLUMN, DataConfig
from sdp_deepspeed.data.files import LocalFiles, find_files
from sdp_deepspeed.data.rows import column_of

# Tests repeat themselves, codec tables and vendored packages are no prose; generated files are longer than this.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}
_LONGEST_SOURCE_FILE = 400_000


class Corpus(Protocol):
    """Documents in a fixed order."""

    def fingerprint(self) -> str:
        """Changes when the documents may have changed."""
        ...

    def documents(self) -> Iterator[str]:
        """All documents, none of them blank."""
        ...


@dataclass(frozen=True)
class StandardLibrary:
    """The .py files of the running interpreter's standard library, sorted by path; a file is a document."""

    root: Path

    def documents(self) -> Iterator[str]:
        for path in sorted(self._paths()):
            source = regular(path).read_bytes()
            if len(source) > _LONGEST_SOURCE_FILE:
                continue
            try:
                text = source.decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text.strip():
                yield text

    def _paths(self) -> Iterator[Path]:
        """Does not go into folders that are skipped: installed packages are many more files."""
        for folder, folders, names in os.walk(self.root):
            folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
            yield from (Path(folder, name) for name in names if name.endswith(".py"))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for text in self.documents():
            digest.update(hashlib.sha256(text.encode("utf-8")).digest())
        return f"stdlib:{digest.hexdigest()}"


@dataclass(frozen=True)
class HubDataset:
    """A data set by name; its rows are the documents. Read by `datasets`, which keeps its own download cache."""

    name: str
    subset: str | None
    split: str
    revision: str | None
    text_column: str
    streaming: bool

    def documents(self) -> Iterator[str]:
        yield from column_of(self._load, self.text_column, where=self.name)

    def _load(self) -> Any:
        import datasets

        return datasets.load_dataset(
            self.name, self.subset, split=self.split, revision=self.revision, streaming=self.streaming
        )

    def fingerprint(self) -> str:
        # By name only: asking the hub would make a start without network impossible although all is cached.
        return f"hub:{self.name}:{self.subset}:{self.split}:{self.revision}:{self.text_column}"


@dataclass(frozen=True)
class Capped:
    """The first documents of a corpus, up to so many bytes of UTF-8."""

    corpus: Corpus
    max_bytes: int

    def documents(self) -> Iterator[str]:
        total = 0
        for text in self.corpus.documents():
            total += len(text.encode("utf-8"))
            if total > self.max_bytes:
                return
            yield text

    def fingerprint(self) -> str:
        return f"{self.corpus.fingerprint()}:{self.max_bytes}"


def open_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config` describes; reads no document yet.

    Raises:
        ValueError: a path without files, or files of several kinds.
    """
    corpus: Corpus
    if config.source == "stdlib":
        corpus = StandardLibrary(Path(sysconfig.get_path("stdlib")))
    elif config.source == "files":
        files = find_files(config.path or "")
        corpus = LocalFiles(files, config.text_column, config.text_documents)
    else:
        corpus = HubDataset(
            name=config.path or "",
            subset=config.subset,
            split=config.split or "train",
            revision=config.revision,
            text_column=config.text_column or DEFAULT_TEXT_COLUMN,
            streaming=config.streaming is not False,
        )
    return corpus if config.max_bytes is None else Capped(corpus, config.max_bytes)
