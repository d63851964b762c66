"""Text files that were cut short at any byte: used as if they were whole or absent, or refused by their name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.properties import fuzzed
from tests.helpers.written_files import WRITTEN_FILES, WrittenFile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # which is what these tests want
REFUSED = object()
ALL_WRITTEN = tempfile.TemporaryDirectory(prefix="sdp-fuzz-")  # removed at exit


@cache
def written(write: Callable[[Path], object]) -> Path:
    folder = Path(tempfile.mkdtemp(dir=ALL_WRITTEN.name))
    write(folder)
    return folder


@contextmanager
def copied(file: WrittenFile) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(written(file.write), folder)
        yield folder


def outcome(file: WrittenFile, read: Callable[[Path], object], content: bytes) -> object:
    """What the reader returns when the file has that content, or REFUSED."""
    with copied(file) as folder:
        path = folder / file.path
        path.write_bytes(content)
        try:
            return read(folder)
        except file.error as error:
            refusal = str(error)
        assert str(path) in refusal
        return REFUSED


@cache
def expected(file: WrittenFile, read: Callable[[Path], object]) -> list[object]:
    """What a reader may return: as of the file as it was written, and as without it."""
    found = [read(written(file.write)), REFUSED]
    with copied(file) as folder:
        (folder / file.path).unlink()
        with suppress(Exception):  # of any kind: it is not this that is asked here
            found.append(read(folder))
    return found


@pytest.mark.parametrize("file", WRITTEN_FILES, ids=lambda file: file.path)
@fuzzed()
@given(st.data())
def test_cut_anywhere(file: WrittenFile, draw: st.DataObject) -> None:
    content = (written(file.write) / file.path).read_bytes()
    length = draw.draw(st.integers(0, len(content) - 1), label="length")
    for read in file.read:
        assert outcome(file, read, content[:length]) in expected(file, read)
