"""Parquet files by row group: text that can be read from any place on, also over a network."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.data.network import reaching, reading_on
from sdp_deepspeed.data.parts import PART_BYTES
from sdp_deepspeed.data.rows import readable

_ROWS = 1000  # at once
# A process reads parts of all files in turn, and what a file says about its row groups is megabytes.
_OPEN_FILES = 32
_THREADS = 16


@dataclass(frozen=True)
class RowGroups:
    """Consecutive row groups of one file.

    Args:
        file: a path, or an address that `fsspec` opens.
        first, stop: row groups.
        size: bytes of the column.
        column: that holds the text.
    """

    file: str
    first: int
    stop: int
    size: int
    column: str

    def documents(self) -> Iterator[str]:
        with _named(self.file):
            groups = _open(self.file).iter_batches(
                batch_size=_ROWS, row_groups=range(self.first, self.stop), columns=[self.column]
            )
        while True:
            with _named(self.file):
                batch = next(groups, None)
            if batch is None:
                return
            texts = batch.column(0).to_pylist()
            yield from (text for text in texts if text is not None and text.strip())


def row_groups_of(files: Sequence[str], column: str) -> list[RowGroups]:
    """The parts of all files, in their order; several threads ask, since each answer may come over a network.

    Raises:
        ValueError: a file is damaged, has no such column, or holds something else than text in it.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda file: list(_groups(file, column)), files))
    return [part for parts in found for part in parts]


def _groups(file: str, column: str) -> Iterator[RowGroups]:
    """Small row groups together, a large one alone."""
    with _named(file):
        opened = _open(file)
        _check_column(opened.schema_arrow, column, file)
        metadata = opened.metadata
        place = [metadata.schema.column(i).path for i in range(metadata.num_columns)].index(column)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = [group.column(place).total_uncompressed_size if group.num_rows else 0 for group in groups]
    first = size = 0
    for group, group_size in enumerate(sizes):
        size += group_size
        if size >= PART_BYTES or (size and group == len(sizes) - 1):
            yield RowGroups(file, first, group + 1, size, column)
            first, size = group + 1, 0


def _check_column(schema: Any, column: str, file: str) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]

    if column not in schema.names:
        raise ValueError(f"{file}: no column {column!r}, it has {schema.names}: set text_column to one of them")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise ValueError(f"{file}: column {column!r} holds {kind}, expected text (a string)")


def _open(file: str) -> Any:
    """Kept open, unless it is another one by now."""
    stat = None if "://" in file else os.stat(file)
    return _opened(file, None if stat is None else (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=_OPEN_FILES)
def _opened(file: str, version: tuple[int, int, int] | None) -> Any:
    del version
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    if "://" not in file:
        return pq.ParquetFile(regular(Path(file)), memory_map=True)
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    files, path = url_to_fs(file)
    return pq.ParquetFile(reading_on(files.open(path, "rb")), pre_buffer=True)


@contextmanager
def _named(file: str) -> Iterator[None]:
    """Errors of reading, with the file's name."""
    try:
        with reaching(file) if "://" in file else nullcontext():
            yield
    except ConnectionError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and file in str(error):
            raise
        raise readable(error, file) from error
