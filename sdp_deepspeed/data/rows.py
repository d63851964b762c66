"""One column of a data set that `datasets` reads, with errors that say what to change."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def column_of(load: Callable[[], Any], column: str, *, where: str) -> Iterator[str]:
    """The texts of `column`, without blank ones.

    Args:
        load: gives a `datasets` data set, streamed or not.
        column: its name.
        where: what is read, for messages.

    Raises:
        ValueError: it cannot be found or read, has no such column, or the column holds something else than text.
        ConnectionError: the hub cannot be reached.
    """
    rows = iter(_rows(load, column, where))
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:
            raise readable(error, where) from error
        text = row.get(column)
        # A JSON line may leave a key out, and web data has empty pages.
        if text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(f"{where}: column {column!r} holds {type(text).__name__}, expected text (a string)")
        if text.strip():
            yield text


def _rows(load: Callable[[], Any], column: str, where: str) -> Iterable[dict[str, Any]]:
    try:
        dataset = load()
        names = dataset.column_names
        if names is None:  # a stream whose columns only its first row tells
            names = list(next(iter(dataset), {}))
    except Exception as error:
        raise readable(error, where) from error
    if names and column not in names:
        raise ValueError(f"{where}: no column {column!r}, it has {names}: set text_column to one of them")
    rows: Iterable[dict[str, Any]] = dataset.select_columns([column]) if names else []
    return rows


def _is_of_content(error: BaseException) -> bool:
    """Wrong bytes, JSON and parquet are ValueErrors (UnicodeDecodeError, pyarrow.ArrowInvalid); what is cut or damaged
    in a compressed file, its library's; in a page of parquet, an OSError without a number, which the system's have."""
    kinds = (ValueError, FileNotFoundError, EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
    if isinstance(error, kinds) or type(error).__name__ == "ZstdError":  # of one of several packages
        return True
    return type(error) is OSError and error.errno is None


def readable(error: Exception, where: str) -> Exception:
    """A mistake in path or content as ValueError in one line; a machine's or network's trouble as it is."""
    chain: list[BaseException] = [error]
    while (below := chain[-1].__cause__) is not None and below not in chain:  # `datasets` wraps what the reader said
        chain.append(below)
    if any(isinstance(e, ConnectionError | TimeoutError) for e in chain) or not any(map(_is_of_content, chain)):
        if isinstance(error, OSError) and error.errno and error.filename is None:  # such as a disk that fails
            return OSError(error.errno, error.strerror, where)
        return error
    said = " ".join(str(chain[-1]).split()) or type(chain[-1]).__name__
    return ValueError(f"{where}: cannot be read as text documents: {said}")
